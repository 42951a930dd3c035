//! Work under one name happens one after the other; work under other names goes on.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError, Weak},
};

use tokio::sync::OwnedMutexGuard;

/// The names under which work goes on. There are at most as many as there are requests.
#[derive(Debug)]
pub struct Turns<K> {
    names: Mutex<BTreeMap<K, Weak<tokio::sync::Mutex<()>>>>,
}

/// The right to work under a name until it is dropped.
#[derive(Debug)]
pub struct Turn {
    _guard: OwnedMutexGuard<()>,
}

impl<K> Default for Turns<K> {
    fn default() -> Self {
        Self { names: Mutex::default() }
    }
}

impl<K: Ord> Turns<K> {
    /// Waits until nobody else works under `name`.
    pub async fn take(&self, name: K) -> Turn {
        let lock = self.lock(name);
        Turn { _guard: lock.lock_owned().await }
    }

    fn lock(&self, name: K) -> Arc<tokio::sync::Mutex<()>> {
        let mut names = self.names.lock().unwrap_or_else(PoisonError::into_inner);
        names.retain(|_, lock| lock.strong_count() > 0);
        let entry = names.entry(name).or_default();
        entry.upgrade().unwrap_or_else(|| {
            let lock = Arc::default();
            *entry = Arc::downgrade(&lock);
            lock
        })
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt;

    use super::*;

    #[tokio::test]
    async fn one_name_waits_and_another_does_not() {
        let turns = Turns::default();
        let first = turns.take("a").await;
        assert!(turns.take("b").now_or_never().is_some());
        assert!(turns.take("a").now_or_never().is_none());
        drop(first);
        assert!(turns.take("a").now_or_never().is_some());
        drop(turns.take("c").await);
        assert_eq!(turns.names.lock().expect("unpoisoned").len(), 1);
    }
}
