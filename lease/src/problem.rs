//! The kinds of problem that gateway and node answer with (RFC 9457).

use types::forward::Problem;

/// A kind of problem: its name, its sentence, its HTTP status.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The body or a parameter cannot be read.
    Malformed,
    /// The body is JSON of the right form that asks for something impossible.
    Unprocessable,
    /// The request's signature is missing or wrong.
    Unauthenticated,
    /// The request was seen before.
    Replayed,
    /// The key may not do this.
    Forbidden,
    /// The lease does not count on this node now.
    LeaseRefused,
    /// There is no such thing.
    NotFound,
    /// The path exists, the method does not.
    MethodNotAllowed,
    /// The caller did not send in time what it announced.
    TooSlow,
    /// It contradicts what is.
    Conflict,
    /// The idempotency key was used for another request.
    KeyReused,
    /// It was here and is gone for good.
    Gone,
    /// The body is too large.
    TooLarge,
    /// The caller keeps as much as it may.
    QuotaExceeded,
    /// The body is of a kind that is not read here.
    UnsupportedMediaType,
    /// The caller asks too much.
    TooManyRequests,
    /// Devices, memory or disk are not free.
    NoCapacity,
    /// The node cannot be reached.
    NodeUnreachable,
    /// The node did not answer in time.
    NodeTimeout,
    /// The part that answers is short of something or stopping.
    Unavailable,
    /// The part that answers failed.
    Internal,
}

impl Kind {
    /// Returns the problem with what was wrong here, where, and what would be right.
    pub fn because(self, detail: impl ToString) -> Problem {
        let (name, title, status) = self.row();
        Problem {
            kind: format!("/problems/{name}"),
            title: title.to_owned(),
            status,
            detail: detail.to_string(),
        }
    }

    /// Returns the problem for an error, with every cause it names.
    pub fn caused_by(self, error: &dyn std::error::Error) -> Problem {
        self.because(chain(error))
    }

    fn row(self) -> (&'static str, &'static str, u16) {
        match self {
            Self::Malformed => ("malformed", "The request cannot be read", 400),
            Self::Unauthenticated => {
                ("unauthenticated", "The request is not signed as it must be", 401)
            }
            Self::Replayed => ("replayed", "The request was seen before", 401),
            Self::Forbidden => ("forbidden", "The key may not do this", 403),
            Self::LeaseRefused => ("lease-refused", "The lease does not count here and now", 403),
            Self::NotFound => ("not-found", "There is no such thing", 404),
            Self::MethodNotAllowed => ("method-not-allowed", "The method does not exist here", 405),
            Self::TooSlow => ("too-slow", "The request did not arrive in time", 408),
            Self::Conflict => ("conflict", "The request contradicts what is", 409),
            Self::NoCapacity => ("no-capacity", "What the lease names is not free", 409),
            Self::Gone => ("gone", "It is gone for good", 410),
            Self::QuotaExceeded => ("quota-exceeded", "You keep as much here as you may", 413),
            Self::TooLarge => ("too-large", "The body is too large", 413),
            Self::UnsupportedMediaType => {
                ("unsupported-media-type", "The body is of a kind that is not read here", 415)
            }
            Self::KeyReused => {
                ("key-reused", "The idempotency key belongs to another request", 422)
            }
            Self::Unprocessable => {
                ("unprocessable", "The request asks for something impossible", 422)
            }
            Self::TooManyRequests => ("too-many-requests", "Too many requests", 429),
            Self::Internal => ("internal", "The part that answers failed", 500),
            Self::NodeUnreachable => ("node-unreachable", "The node cannot be reached", 502),
            Self::Unavailable => ("unavailable", "The service cannot answer now", 503),
            Self::NodeTimeout => ("node-timeout", "The node did not answer in time", 504),
        }
    }
}

/// Returns what an error says, with its causes.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(inner) = cause {
        text.push_str(": ");
        text.push_str(&inner.to_string());
        cause = inner.source();
    }
    text
}
