//! What this process may take while it imports an image, which may be anybody's work. It does nothing else then, and
//! ends with the import.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Most address space, in bytes. One block of zstd may make gigabytes inside of the library that unpacks it, where
/// nobody counts them: better this process ends than others for want of memory. What an import needs, with the largest
/// tables of a format and the program itself, is a tenth of it.
const ADDRESS_SPACE: u64 = 4 << 30;

/// Bounds memory, and allows as many open files as may be: all extents of a split VMDK are open.
pub(super) fn set() {
    // An import works with the limits as they were, unless it is hostile or of very many files.
    let _ = setrlimit(Resource::As, memory(getrlimit(Resource::As)));
    let _ = setrlimit(Resource::Nofile, files(getrlimit(Resource::Nofile)));
}

fn memory(limit: Rlimit) -> Rlimit {
    let current = limit.current.map_or(ADDRESS_SPACE, |current| current.min(ADDRESS_SPACE));
    Rlimit { current: Some(current), ..limit }
}

fn files(limit: Rlimit) -> Rlimit {
    Rlimit { current: limit.maximum, ..limit }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_bounded_unless_it_is_more_so_already() {
        let bounded = |current| memory(Rlimit { current, maximum: None });
        let most = Rlimit { current: Some(4 << 30), maximum: None };
        assert_eq!([None, Some(5 << 30), Some(4 << 30)].map(bounded), [most; 3]);
        let little = Rlimit { current: Some(1 << 30), maximum: Some(2 << 30) };
        assert_eq!(memory(little), little);
    }

    #[test]
    fn as_many_files_are_open_as_may_be() {
        let raised = files(Rlimit { current: Some(1024), maximum: Some(4096) });
        assert_eq!(raised, Rlimit { current: Some(4096), maximum: Some(4096) });
        assert_eq!(files(Rlimit { current: Some(1024), maximum: None }).current, None);
    }
}
