//! Text that Prometheus reads. Pure.
//! Source: Prometheus "Exposition formats", text-based format 0.0.4.

use std::fmt::{Display, Write};

/// Media type of the text.
pub const MEDIA_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Longest value of a label, in bytes: what others say must not make answers grow.
pub const MAX_LABEL: usize = 256;

/// What a metric's numbers mean.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// They only grow while a process lives.
    Counter,
    /// They come and go.
    Gauge,
}

/// A metric: its name, what its numbers mean, and what it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Metric {
    /// Its name, without `holdfast_`.
    pub name: &'static str,
    /// What its numbers mean.
    pub kind: Kind,
    /// What it is, in words.
    pub help: &'static str,
}

impl Metric {
    /// A metric whose numbers only grow.
    pub const fn counter(name: &'static str, help: &'static str) -> Self {
        Self { name, kind: Kind::Counter, help }
    }

    /// A metric whose numbers come and go.
    pub const fn gauge(name: &'static str, help: &'static str) -> Self {
        Self { name, kind: Kind::Gauge, help }
    }
}

/// The text as it grows.
#[derive(Debug, Default)]
pub struct Exposition {
    text: String,
}

impl Exposition {
    /// Begins a metric, whose samples follow. Each metric is begun once.
    pub fn metric(&mut self, metric: Metric) -> Samples<'_> {
        Samples { text: &mut self.text, metric, begun: false }
    }

    /// Adds a metric with one sample that has no labels.
    pub fn number(&mut self, metric: Metric, value: impl Display) {
        self.metric(metric).sample(&[], value);
    }

    /// Returns the text.
    pub fn finish(self) -> String {
        self.text
    }
}

/// The samples of one metric.
#[derive(Debug)]
pub struct Samples<'a> {
    text: &'a mut String,
    metric: Metric,
    begun: bool,
}

impl Samples<'_> {
    /// Adds a sample with labels, names and values.
    pub fn sample(&mut self, labels: &[(&str, &str)], value: impl Display) {
        let Metric { name, kind, help } = self.metric;
        if !self.begun {
            let kind = match kind {
                Kind::Counter => "counter",
                Kind::Gauge => "gauge",
            };
            // Writing to a text cannot fail.
            let _ = writeln!(self.text, "# HELP holdfast_{name} {help}");
            let _ = writeln!(self.text, "# TYPE holdfast_{name} {kind}");
            self.begun = true;
        }
        let _ = write!(self.text, "holdfast_{name}");
        for (index, (label, value)) in labels.iter().enumerate() {
            let mark = if index == 0 { '{' } else { ',' };
            let _ = write!(self.text, "{mark}{label}=\"{}\"", escaped(value));
        }
        let end = if labels.is_empty() { "" } else { "}" };
        let _ = writeln!(self.text, "{end} {value}");
    }
}

/// Returns a label's value with what would end it escaped, and without control characters.
fn escaped(value: &str) -> String {
    let mut text = String::with_capacity(value.len());
    for character in value.chars() {
        if text.len() >= MAX_LABEL {
            break;
        }
        match character {
            '\\' => text.push_str("\\\\"),
            '"' => text.push_str("\\\""),
            other if other.is_control() => text.push(' '),
            other => text.push(other),
        }
    }
    text
}

/// Milliseconds as seconds.
#[derive(Debug, Clone, Copy)]
pub struct Millis(pub u64);

impl Display for Millis {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_metric_is_introduced_once_and_only_with_samples() {
        let mut text = Exposition::default();
        text.metric(Metric::gauge("nothing", "No samples."));
        let mut samples = text.metric(Metric::counter("requests_total", "Requests."));
        samples.sample(&[("method", "GET")], 3);
        samples.sample(&[("method", "P\"U\\T\n"), ("more", "1")], 4);
        text.number(Metric::gauge("uptime_seconds", "Uptime."), Millis(1_042));
        assert_eq!(
            text.finish(),
            "# HELP holdfast_requests_total Requests.\n\
             # TYPE holdfast_requests_total counter\n\
             holdfast_requests_total{method=\"GET\"} 3\n\
             holdfast_requests_total{method=\"P\\\"U\\\\T \",more=\"1\"} 4\n\
             # HELP holdfast_uptime_seconds Uptime.\n\
             # TYPE holdfast_uptime_seconds gauge\n\
             holdfast_uptime_seconds 1.042\n"
        );
    }

    #[test]
    fn labels_have_an_end() {
        assert!(escaped(&"x".repeat(9999)).len() <= MAX_LABEL);
    }
}
