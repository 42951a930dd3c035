//! Which time to believe. Pure.
//! Source: RFC 5905 §11.2.1 (intersection algorithm), K. Marzullo's thesis (1984).

use super::sntp::Sample;

/// Within this the system clock is right enough, in nanoseconds.
const CLOSE_NS: i128 = 1_000_000;
/// Within this it catches up without a step, in nanoseconds: RFC 5905 STEPT. At half a thousandth
/// that takes 256 s, less than the pause between two polls.
const SLEW_NS: i128 = 128_000_000;
/// Once the clock was set, one source alone moves it no further than this, in nanoseconds: fifteen
/// minutes, more than any oscillator is off between two polls.
const LONE_STEP_NS: i128 = 15 * 60 * 1_000_000_000;

/// What several sources say together.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Agreement {
    /// True time minus system time, in nanoseconds: the middle of what all agree on.
    pub offset_ns: i128,
    /// They agree on it within this, in nanoseconds.
    pub error_ns: i128,
    /// How many sources agree.
    pub sources: usize,
}

/// Returns what most of the sources agree on; `None` unless that is more than half of them.
///
/// Each sample says that the offset lies within its error; sources agree when those ranges overlap.
pub fn agree(samples: &[Sample]) -> Option<Agreement> {
    let mut edges: Vec<(i128, i8)> = samples
        .iter()
        .flat_map(|sample| {
            let Sample { offset_ns, error_ns, .. } = *sample;
            // Ranges that touch overlap, so those that begin come before those that end.
            [(offset_ns - error_ns, -1), (offset_ns + error_ns, 1)]
        })
        .collect();
    edges.sort_unstable();
    let mut best: Option<(usize, i128, i128)> = None;
    let mut open = 0_usize;
    for (position, (from, kind)) in edges.iter().enumerate() {
        if *kind > 0 {
            open -= 1;
            continue;
        }
        open += 1;
        let to = edges.get(position + 1).map_or(*from, |(next, _)| *next);
        if best.is_none_or(|(most, ..)| open > most) {
            best = Some((open, *from, to));
        }
    }
    let (sources, from, to) = best?;
    (sources * 2 > samples.len()).then_some(Agreement {
        offset_ns: from + (to - from) / 2,
        error_ns: (to - from) / 2,
        sources,
    })
}

/// What to do with the system clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decision {
    /// It is right.
    Keep,
    /// Let it catch up by this many nanoseconds.
    Slew {
        /// True time minus system time, in nanoseconds.
        offset_ns: i128,
    },
    /// Set it, by this many nanoseconds.
    Step {
        /// True time minus system time, in nanoseconds.
        offset_ns: i128,
    },
    /// The agreed time is before the floor.
    BeforeFloor,
    /// Only one source says so, and the clock was right before.
    TooFar,
}

/// Whether the system clock was set since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Trust {
    /// It comes from the hardware clock, which may be anything.
    #[default]
    Unset,
    /// Sources have agreed on it.
    Set,
}

/// Decides, when it is `now_ns` by the system clock, and nothing before `floor_ns` is believed.
/// Both in nanoseconds since 1970.
pub fn decide(agreement: Agreement, trust: Trust, now_ns: i128, floor_ns: i128) -> Decision {
    let Agreement { offset_ns, sources, .. } = agreement;
    if now_ns + offset_ns < floor_ns {
        return Decision::BeforeFloor;
    }
    if offset_ns.abs() <= CLOSE_NS {
        return Decision::Keep;
    }
    if offset_ns.abs() <= SLEW_NS {
        return Decision::Slew { offset_ns };
    }
    if trust == Trust::Set && sources < 2 && offset_ns.abs() > LONE_STEP_NS {
        return Decision::TooFar;
    }
    Decision::Step { offset_ns }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(offset_ns: i128, error_ns: i128) -> Sample {
        Sample { offset_ns, error_ns, stratum: 2 }
    }

    #[test]
    fn sources_that_overlap_agree_on_what_they_share() {
        let found = agree(&[sample(100, 10), sample(105, 10), sample(98, 20)]);
        assert_eq!(found, Some(Agreement { offset_ns: 102, error_ns: 7, sources: 3 }));
    }

    #[test]
    fn a_liar_is_outvoted() {
        let found = agree(&[sample(100, 10), sample(1_000_000, 1), sample(105, 10)]);
        assert_eq!(found, Some(Agreement { offset_ns: 102, error_ns: 7, sources: 2 }));
    }

    #[test]
    fn a_tie_decides_nothing() {
        assert_eq!(agree(&[sample(100, 10), sample(900, 10)]), None);
        assert_eq!(agree(&[]), None);
    }

    #[test]
    fn one_source_is_one_source() {
        assert_eq!(
            agree(&[sample(-7, 3)]),
            Some(Agreement { offset_ns: -7, error_ns: 3, sources: 1 })
        );
    }

    #[test]
    fn ranges_that_touch_agree() {
        let found = agree(&[sample(0, 10), sample(20, 10)]);
        assert_eq!(found, Some(Agreement { offset_ns: 10, error_ns: 0, sources: 2 }));
    }

    #[test]
    fn decisions_follow_the_table() {
        const HOUR: i128 = 3_600_000_000_000;
        const NOW: i128 = 10_000 * HOUR;
        let check = |offset_ns, sources, trust, decision| {
            let agreement = Agreement { offset_ns, error_ns: 0, sources };
            assert_eq!(decide(agreement, trust, NOW, NOW - HOUR), decision, "{agreement:?}");
        };
        check(CLOSE_NS, 1, Trust::Set, Decision::Keep);
        check(-CLOSE_NS - 1, 1, Trust::Set, Decision::Slew { offset_ns: -CLOSE_NS - 1 });
        check(SLEW_NS, 1, Trust::Unset, Decision::Slew { offset_ns: SLEW_NS });
        check(-SLEW_NS - 1, 1, Trust::Set, Decision::Step { offset_ns: -SLEW_NS - 1 });
        check(HOUR, 1, Trust::Unset, Decision::Step { offset_ns: HOUR });
        check(HOUR, 1, Trust::Set, Decision::TooFar);
        check(HOUR, 2, Trust::Set, Decision::Step { offset_ns: HOUR });
        check(-2 * HOUR, 9, Trust::Unset, Decision::BeforeFloor);
    }

    proptest::proptest! {
        /// The agreed offset lies within the error of as many sources as it claims.
        #[test]
        fn agreement_counts_truly(
            samples in proptest::collection::vec((-1000_i128..1000, 1_i128..200), 0..9)
        ) {
            let samples: Vec<Sample> =
                samples.into_iter().map(|(offset, error)| sample(offset, error)).collect();
            let covering = |at: i128| {
                samples.iter().filter(|s| (s.offset_ns - at).abs() <= s.error_ns).count()
            };
            let most = (-1300..1300).map(covering).max().unwrap_or(0);
            match agree(&samples) {
                Some(found) => {
                    proptest::prop_assert_eq!(found.sources, most);
                    proptest::prop_assert_eq!(covering(found.offset_ns), most);
                }
                None => proptest::prop_assert!(most * 2 <= samples.len()),
            }
        }
    }
}
