//! The overlay inbox.
