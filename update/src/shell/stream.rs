//! A target that goes somewhere else than into a file, from several places that have it.

use std::time::Duration;

use tokio::time::Instant;

use super::{
    Span,
    session::{IDLE_RESUMES, RESUME_PAUSE, SLOWEST, Session, SessionError, resumable},
};
use crate::target::{Check, Target};

/// What takes a target's bytes. They are not believed before [`Session::stream`] returned.
pub trait Sink {
    /// Takes what comes next.
    fn take(&mut self, bytes: &[u8]) -> Result<(), SinkError>;
    /// Forgets what came so far.
    fn restart(&mut self);
}

/// Why bytes could not be taken: the sink's own error.
#[derive(Debug, thiserror::Error)]
#[error(transparent)]
pub struct SinkError(#[from] pub Box<dyn std::error::Error + Send + Sync>);

/// How a stream ends.
enum Broken {
    /// By the sink.
    Sink(SinkError),
    /// By what the place said; another may do better.
    Place(SessionError),
}

impl From<SinkError> for Broken {
    fn from(error: SinkError) -> Self {
        Self::Sink(error)
    }
}

impl Session {
    /// Streams a target into `sink`, from the first of the URLs `bases` on. What broke off goes on
    /// where it was, at the same place or at the next; what turns out wrong begins anew at the next.
    ///
    /// The outer error is the sink's, the inner one that of the last place.
    pub async fn stream(
        &mut self,
        target: &Target,
        bases: &[String],
        sink: &mut (dyn Sink + Send),
    ) -> Result<Result<(), SessionError>, SinkError> {
        let refused = |source| SessionError::Target { path: target.path.clone(), source };
        if let Err(source) = target.checkable() {
            return Ok(Err(refused(source)));
        }
        let mut check = target.check();
        let mut last = SessionError::Missing { path: target.path.clone() };
        for base in bases {
            let url = format!("{}/{}", base.trim_end_matches('/'), target.location);
            match self.exhaust(target, &url, &mut check, sink).await {
                Ok(()) => return Ok(Ok(())),
                Err(Broken::Sink(error)) => return Err(error),
                Err(Broken::Place(error)) => last = error,
            }
            if matches!(last, SessionError::Target { .. }) {
                // Nobody can say which of the places lied.
                check = target.check();
                sink.restart();
            }
        }
        Ok(Err(last))
    }

    /// Takes what one place has.
    async fn exhaust(
        &mut self,
        target: &Target,
        url: &str,
        check: &mut Check,
        sink: &mut (dyn Sink + Send),
    ) -> Result<(), Broken> {
        let deadline = Instant::now() + Duration::from_secs(60 + target.file.length / SLOWEST);
        let mut idle = 0;
        while check.found() < target.file.length {
            let before = check.found();
            match self.take_into(target, url, (&mut *check, &mut *sink), deadline).await {
                Ok(()) if check.found() > before => idle = 0,
                Ok(()) => break,
                Err(Broken::Place(SessionError::Fetch(error))) if resumable(&error) => {
                    idle = if check.found() > before { 0 } else { idle + 1 };
                    if idle > IDLE_RESUMES || Instant::now() >= deadline {
                        return Err(Broken::Place(error.into()));
                    }
                    tokio::time::sleep(RESUME_PAUSE).await;
                }
                Err(error) => return Err(error),
            }
        }
        let whole = std::mem::replace(check, target.check());
        whole.finish().map_err(|source| {
            Broken::Place(SessionError::Target { path: target.path.clone(), source })
        })
    }

    /// Takes what one answer brings.
    async fn take_into(
        &mut self,
        target: &Target,
        url: &str,
        (check, sink): (&mut Check, &mut (dyn Sink + Send)),
        deadline: Instant,
    ) -> Result<(), Broken> {
        let place = |error: SessionError| Broken::Place(error);
        let opened = self.fetcher.open(url, Span::from(check.found()), deadline).await;
        let opened = opened.map_err(|error| place(error.into()))?;
        let missing = || place(SessionError::Missing { path: target.path.clone() });
        let mut download = opened.ok_or_else(missing)?;
        if download.from == 0 && check.found() > 0 {
            *check = target.check();
            sink.restart();
        }
        while let Some(bytes) =
            download.next(deadline).await.map_err(|error| place(error.into()))?
        {
            let refused = |source| SessionError::Target { path: target.path.clone(), source };
            check.update(&bytes).map_err(|source| place(refused(source)))?;
            sink.take(&bytes)?;
        }
        Ok(())
    }
}
