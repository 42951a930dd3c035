//! overlay
