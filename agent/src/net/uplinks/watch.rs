//! Whether an uplink's gateway answers. Pure.

use super::addressing::Standing;
use crate::net::{Reach, kernel::Neighbour};

/// So many looks in a row without an answer make a gateway silent: with the kernel's three requests
/// a second apart, some six seconds at [`super::task::PROBE`].
const SILENCE: u32 = 3;
/// So many in a row with one make it good again, so that a flapping one is not preferred.
const RECOVERY: u32 = 3;

/// What is known of one gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Watch {
    reach: Reach,
    /// Looks in a row that contradict it.
    against: u32,
}

impl Watch {
    pub(super) fn reach(self) -> Reach {
        self.reach
    }

    pub(super) fn standing(self) -> Standing {
        match self.reach {
            Reach::Unknown | Reach::Answers => Standing::Good,
            Reach::Silent => Standing::Silent,
        }
    }

    /// The cable carries no signal: there is nothing to wait for.
    pub(super) fn handle_no_carrier(&mut self) {
        *self = Self { reach: Reach::Silent, against: 0 };
    }

    /// Takes what a look found.
    pub(super) fn handle_look(&mut self, found: Neighbour) {
        let (reach, needed) = match (found, self.reach) {
            (Neighbour::Answers, Reach::Unknown) => (Reach::Answers, 1),
            (Neighbour::Answers, Reach::Silent) => (Reach::Answers, RECOVERY),
            (Neighbour::Silent | Neighbour::Asked, Reach::Unknown | Reach::Answers) => {
                (Reach::Silent, SILENCE)
            }
            (Neighbour::Answers, Reach::Answers)
            | (Neighbour::Silent | Neighbour::Asked, Reach::Silent) => {
                self.against = 0;
                return;
            }
        };
        self.against += 1;
        if self.against >= needed {
            *self = Self { reach, against: 0 };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(looks: &[Neighbour]) -> Reach {
        let mut watch = Watch::default();
        looks.iter().for_each(|look| watch.handle_look(*look));
        watch.reach()
    }

    #[test]
    fn one_lost_answer_changes_nothing_and_three_do() {
        use Neighbour::{Answers, Asked, Silent};
        assert_eq!(after(&[Answers, Asked, Silent, Answers, Asked, Silent]), Reach::Answers);
        assert_eq!(after(&[Answers, Asked, Asked, Silent]), Reach::Silent);
        assert_eq!(after(&[Asked, Silent, Silent]), Reach::Silent);
    }

    #[test]
    fn a_gateway_that_comes_back_must_stay_a_while() {
        use Neighbour::{Answers, Silent};
        let gone = [Silent, Silent, Silent];
        assert_eq!(
            after(&[&gone[..], &[Answers, Answers, Silent, Answers]].concat()),
            Reach::Silent
        );
        assert_eq!(after(&[&gone[..], &[Answers, Answers, Answers]].concat()), Reach::Answers);
        let mut watch = Watch::default();
        watch.handle_no_carrier();
        assert_eq!(watch.standing(), Standing::Silent);
    }
}
