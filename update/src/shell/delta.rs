//! A program that is put together from one that is there and from what is fetched. Whatever goes wrong
//! on that way, the whole program is fetched.

use std::{ops::Range, time::Duration};

use tokio::time::Instant;

use super::{
    Span,
    session::{SLOWEST, Session, SessionError},
    stream::{Sink, SinkError},
};
use crate::{
    delta::{self, Chunks, Piece},
    target::{Check, Target},
};

/// What a program is put together from.
#[derive(Debug, Clone, Copy)]
pub struct Base<'a> {
    /// The chunks of the program that is wanted, as its publisher lists them.
    pub list: &'a [u8],
    /// The program that is there.
    pub program: &'a [u8],
}

/// How a program came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Streamed {
    /// Bytes of it that were fetched, for nothing too.
    pub fetched: u64,
}

/// Why a program was not put together.
enum Failed {
    Sink(SinkError),
    Place,
}

impl From<SinkError> for Failed {
    fn from(error: SinkError) -> Self {
        Self::Sink(error)
    }
}

/// A program that is being put together.
struct Assembly<'a> {
    check: Check,
    sink: &'a mut (dyn Sink + Send),
    fetched: u64,
    deadline: Instant,
}

impl Session {
    /// Streams a target into `sink` as [`Session::stream`] does, and takes from `base` what is the same
    /// there.
    ///
    /// The outer error is the sink's, the inner one that of the last place.
    pub async fn stream_over(
        &mut self,
        target: &Target,
        bases: &[String],
        base: Base<'_>,
        sink: &mut (dyn Sink + Send),
    ) -> Result<Result<Streamed, SessionError>, SinkError> {
        let list = Chunks::parse(base.list).ok();
        let list = list.filter(|list| list.length() == target.file.length);
        let plan = list.and_then(|list| list.plan(base.program));
        let mut wasted = 0;
        if let Some(pieces) = plan {
            match self.assemble(target, bases, (&pieces, base.program), sink).await {
                (_, Err(Failed::Sink(error))) => return Err(error),
                (fetched, Ok(())) => return Ok(Ok(Streamed { fetched })),
                (fetched, Err(Failed::Place)) => wasted = fetched,
            }
            sink.restart();
        }
        let whole = self.stream(target, bases, sink).await?;
        Ok(whole.map(|()| Streamed { fetched: wasted + target.file.length }))
    }

    async fn assemble(
        &mut self,
        target: &Target,
        bases: &[String],
        (pieces, program): (&[Piece], &[u8]),
        sink: &mut (dyn Sink + Send),
    ) -> (u64, Result<(), Failed>) {
        let time = Duration::from_secs(60 + delta::fetched(pieces) / SLOWEST);
        let deadline = Instant::now() + time;
        let mut assembly = Assembly { check: target.check(), sink, fetched: 0, deadline };
        for piece in pieces {
            let done = match piece {
                Piece::Copy(range) => assembly.take(&program[range.clone()]),
                Piece::Fetch(range) => {
                    self.fetch_piece(target, bases, range.clone(), &mut assembly).await
                }
            };
            if let Err(error) = done {
                return (assembly.fetched, Err(error));
            }
        }
        let whole = assembly.check.finish().map_err(|_| Failed::Place);
        (assembly.fetched, whole)
    }

    /// Fetches one piece. What broke off goes on at the next place.
    async fn fetch_piece(
        &mut self,
        target: &Target,
        bases: &[String],
        range: Range<u64>,
        assembly: &mut Assembly<'_>,
    ) -> Result<(), Failed> {
        for base in bases {
            let from = assembly.check.found();
            if from == range.end {
                return Ok(());
            }
            let url = format!("{}/{}", base.trim_end_matches('/'), target.location);
            let span = Span { from, to: Some(range.end) };
            let opened = self.fetcher.open(&url, span, assembly.deadline).await;
            // A server that cannot send a part is of no use here.
            let Ok(Some(mut download)) = opened else { continue };
            if download.from != from {
                continue;
            }
            while assembly.check.found() < range.end
                && let Ok(Some(bytes)) = download.next(assembly.deadline).await
            {
                let left = range.end - assembly.check.found();
                let wanted = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                assembly.fetched += wanted as u64;
                assembly.take(&bytes[..wanted])?;
            }
        }
        if assembly.check.found() == range.end { Ok(()) } else { Err(Failed::Place) }
    }
}

impl Assembly<'_> {
    fn take(&mut self, bytes: &[u8]) -> Result<(), Failed> {
        self.check.update(bytes).map_err(|_| Failed::Place)?;
        Ok(self.sink.take(bytes)?)
    }
}
