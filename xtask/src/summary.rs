//! What a test program's output says: what passed and failed, what was skipped and why, and what
//! failed tests printed, so that it can be told once more at the end.

/// What one stage found.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Counts {
    pub(crate) passed: u64,
    pub(crate) failed: u64,
    /// Why tests were skipped, which the summary counts among the passed.
    pub(crate) skipped: Vec<String>,
    /// Why programs were not started, of which no test is counted.
    pub(crate) left_out: Vec<String>,
    /// What failed tests printed.
    pub(crate) evidence: Vec<String>,
}

impl Counts {
    /// Adds what another test program found.
    pub(crate) fn add(&mut self, other: Self) {
        self.passed += other.passed;
        self.failed += other.failed;
        self.skipped.extend(other.skipped);
        self.left_out.extend(other.left_out);
        self.evidence.extend(other.evidence);
    }
}

/// Which part of a test program's output a line belongs to.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// One line for each test, and the summary.
    #[default]
    Results,
    /// What passed tests printed, and their names again.
    Successes,
    /// What failed tests printed, and their names again.
    Failures,
}

/// Reads the output of test programs, line by line.
#[derive(Debug, Default)]
pub(crate) struct Reader {
    pub(crate) counts: Counts,
    part: Part,
}

impl Reader {
    /// Takes one line in. Returns whether it is worth showing now.
    pub(crate) fn read(&mut self, line: &str) -> bool {
        let skip = line.trim_start().strip_prefix("skipped: ");
        if let Some(reason) = skip {
            self.counts.skipped.push(reason.to_owned());
        }
        match line {
            "successes:" => self.part = Part::Successes,
            "failures:" => self.part = Part::Failures,
            _ if line.starts_with("test result: ") => {
                self.part = Part::Results;
                self.summary(line);
            }
            _ if self.part == Part::Failures => self.counts.evidence.push(line.to_owned()),
            _ => {}
        }
        self.part != Part::Successes || skip.is_some()
    }

    fn summary(&mut self, line: &str) {
        for part in line.trim_start_matches("test result: ").split([';', '.']) {
            let mut words = part.split_whitespace();
            let (Some(number), Some(what)) = (words.next(), words.next()) else { continue };
            let Ok(number) = number.parse::<u64>() else { continue };
            match what {
                "passed" => self.counts.passed += number,
                "failed" => self.counts.failed += number,
                _ => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_skips_and_evidence_are_told_apart() {
        let output = "test a ... ok\ntest b ... FAILED\n\nsuccesses:\n\n---- a stdout ----\nnoise\n\
                      skipped: no /dev/kvm here\n\nsuccesses:\n    a\n\nfailures:\n\n\
                      ---- b stdout ----\nwhy\n\nfailures:\n    b\n\n\
                      test result: FAILED. 11 passed; 2 failed; 0 ignored; 0 measured";
        let mut reader = Reader::default();
        let shown: Vec<&str> = output.lines().filter(|line| reader.read(line)).collect();
        assert_eq!((reader.counts.passed, reader.counts.failed), (11, 2));
        assert_eq!(reader.counts.skipped, ["no /dev/kvm here"]);
        assert!(reader.counts.evidence.contains(&"why".to_owned()));
        assert!(shown.contains(&"skipped: no /dev/kvm here") && !shown.contains(&"noise"));
    }
}
