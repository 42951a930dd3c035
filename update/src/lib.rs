//! update
