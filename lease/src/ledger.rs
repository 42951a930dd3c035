//! An append-only log in which nothing can be altered unnoticed.
