//! Which answer a request wants. Pure.

use types::{
    logs::{Level, LogSource},
    query::{Query, QueryError},
};

use crate::logs::book::Filter;

/// Longest wait for something new, in milliseconds.
pub const MAX_WAIT_MS: u64 = 30_000;

/// Longest target that is looked at, in bytes.
const MAX_TARGET: usize = 1024;

/// What is wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Route {
    /// `GET /v1/status`
    Status,
    /// `GET /metrics`
    Metrics,
    /// `GET /v1/logs[?from=NUMBER][&level=LEVEL][&source=SOURCE][&wait_ms=MS]`: lines from a
    /// number on that matter at least so much.
    Logs {
        /// Which.
        filter: Filter,
        /// How long to wait for one, in milliseconds.
        wait_ms: u64,
    },
    /// `GET /v1/events[?from=NUMBER][&wait_ms=MS]`
    Events {
        /// Number of the first.
        from: u64,
        /// How long to wait for one, in milliseconds.
        wait_ms: u64,
    },
}

/// Why a request has no answer.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs, reason = "the message is the doc")]
pub enum RouteError {
    #[error("only GET is understood here: nothing can be changed")]
    Method,
    #[error("there is /v1/status, /v1/logs, /v1/events and /metrics; not {path:?}")]
    Path { path: String },
    #[error(transparent)]
    Query(#[from] QueryError),
}

impl RouteError {
    /// Returns the HTTP status that says so.
    pub const fn status(&self) -> u16 {
        match self {
            Self::Method => 405,
            Self::Path { .. } => 404,
            Self::Query(_) => 400,
        }
    }
}

impl Route {
    /// Finds out what is wanted.
    pub fn parse(method: &str, target: &str) -> Result<Self, RouteError> {
        if method != "GET" {
            return Err(RouteError::Method);
        }
        let path = target.split_once('?').map_or(target, |(path, _)| path);
        if target.len() > MAX_TARGET {
            return Err(RouteError::Path { path: path.chars().take(64).collect() });
        }
        let query = Query::of(target);
        query.only(&["from", "level", "source", "wait_ms"])?;
        let filter = filter(query)?;
        let wait_ms = query.number("wait_ms")?.unwrap_or(0).min(MAX_WAIT_MS);
        match path {
            "/v1/status" => Ok(Self::Status),
            "/metrics" => Ok(Self::Metrics),
            "/v1/logs" => Ok(Self::Logs { filter, wait_ms }),
            "/v1/events" => Ok(Self::Events { from: filter.from, wait_ms }),
            other => Err(RouteError::Path { path: other.chars().take(64).collect() }),
        }
    }
}

/// Returns which lines of the journal a query wants.
fn filter(query: Query<'_>) -> Result<Filter, RouteError> {
    let level = query.parameter("level")?.map(|value| {
        let found = Level::ALL.into_iter().find(|level| level.name() == value);
        found.ok_or_else(|| wrong("level", value, "error, warning, notice, info or debug"))
    });
    let source = query.parameter("source")?.map(|value| {
        let found = LogSource::ALL.into_iter().find(|source| source.name() == value);
        found.ok_or_else(|| wrong("source", value, "agent, dashboard, init, kernel or machine"))
    });
    Ok(Filter {
        from: query.number("from")?.unwrap_or(0),
        level: level.transpose()?.unwrap_or(Level::Debug),
        source: source.transpose()?,
    })
}

fn wrong(name: &str, value: String, right: &'static str) -> RouteError {
    QueryError::Value { name: name.to_owned(), value, right }.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_are_told_apart() {
        let all = Filter { from: 0, level: Level::Debug, source: None };
        let check = |target, wanted| assert_eq!(Route::parse("GET", target), Ok(wanted));
        check("/v1/status", Route::Status);
        check("/metrics", Route::Metrics);
        check("/v1/logs", Route::Logs { filter: all, wait_ms: 0 });
        let filter = Filter { from: 7, level: Level::Warning, source: Some(LogSource::Init) };
        let target = "/v1/logs?from=7&level=warning&source=init&wait_ms=99999999";
        check(target, Route::Logs { filter, wait_ms: MAX_WAIT_MS });
        check("/v1/events?from=3", Route::Events { from: 3, wait_ms: 0 });
        check("/v1/events?fr%6Fm=%33&&", Route::Events { from: 3, wait_ms: 0 });
    }

    #[test]
    fn everything_else_is_refused_with_what_would_be_right() {
        let status = |method, target| Route::parse(method, target).map_err(|error| error.status());
        assert_eq!(status("POST", "/v1/status"), Err(405));
        assert_eq!(status("GET", "/v1/machines"), Err(404));
        assert_eq!(status("GET", "/v1/logs?from=-1"), Err(400));
        assert_eq!(status("GET", "/v1/logs?level=loud"), Err(400));
        assert_eq!(status("GET", "/v1/logs?form=1"), Err(400));
        assert_eq!(status("GET", "/v1/logs?from=+1"), Err(400));
        assert_eq!(status("GET", "/v1/logs?from=1&from=1"), Err(400));
        assert_eq!(status("GET", "/v1/logs?source=%zz"), Err(400));
        assert_eq!(status("GET", &format!("/{}", "x".repeat(MAX_TARGET))), Err(404));
    }
}
