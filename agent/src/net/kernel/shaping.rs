//! How fast an interface sends: a token bucket (`sch_tbf`), over routing netlink. Thin.
//! Source: Linux `include/uapi/linux/pkt_sched.h`, `struct tc_tbf_qopt`, `net/sched/sch_tbf.c`.
//!
//! | Offset | Size | Field of `TCA_TBF_PARMS`                                   |
//! |--------|------|------------------------------------------------------------|
//! | 0      | 12   | rate: cell log, link layer, overhead, align, least, bytes/s |
//! | 12     | 12   | peak rate, none                                            |
//! | 24     | 4    | bytes that may wait                                        |
//! | 28     | 4    | burst in ticks; `TCA_TBF_BURST` says it in bytes instead   |
//! | 32     | 4    | peak burst, none                                           |

use futures_util::StreamExt;
use netlink_packet_core::{
    DefaultNla, NLM_F_ACK, NLM_F_CREATE, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::{
    RouteNetlinkMessage,
    tc::{TcAttribute, TcHandle, TcMessage, TcOption},
};

use super::{Kernel, KernelError, answered, failed};
use crate::net::ruleset::ByteRate;

/// `TCA_TBF_PARMS`, `TCA_TBF_RATE64`, `TCA_TBF_BURST`.
const PARAMETERS: u16 = 1;
const RATE64: u16 = 4;
const BURST: u16 = 6;
const PARAMETERS_LENGTH: usize = 36;
/// `TC_LINKLAYER_ETHERNET`: no table of transmission times is needed then.
const ETHERNET: u8 = 1;
/// What an idle receiver may get at once, in milliseconds at the rate; short, so that no one sees
/// more than the rate for long.
const BURST_MS: u64 = 10;
/// What may wait, in milliseconds at the rate, before something is dropped.
const QUEUE_MS: u64 = 50;

impl Kernel {
    /// Makes the interface send no faster than `limit`, all of its queues together, or as fast as it can.
    ///
    /// A tap's queues are rings already, so that nothing waits before them without a limit. Called before
    /// the interface is up: the kernel would give a tap with several queues its default for 256 of them,
    /// which is 17 MiB.
    pub(in crate::net) async fn shape(
        &self,
        index: u32,
        limit: Option<ByteRate>,
    ) -> Result<(), KernelError> {
        let mut message = TcMessage::with_index(i32::try_from(index).unwrap_or(i32::MAX));
        message.header.parent = TcHandle::ROOT;
        let what = || format!("limit what interface {index} sends");
        if let Some(rate) = limit {
            message.header.handle = TcHandle { major: 1, minor: 0 };
            message.attributes.push(TcAttribute::Kind("tbf".to_owned()));
            message.attributes.push(TcAttribute::Options(options(rate)));
        } else {
            message.attributes.push(TcAttribute::Kind("noqueue".to_owned()));
        }
        let request = RouteNetlinkMessage::NewQueueDiscipline(message);
        let flags = NLM_F_REQUEST | NLM_F_ACK | NLM_F_CREATE | NLM_F_REPLACE;
        answered(self.ask(request, flags)).await.map_err(failed(what))
    }

    async fn ask(&self, request: RouteNetlinkMessage, flags: u16) -> Result<(), rtnetlink::Error> {
        let mut request = NetlinkMessage::from(request);
        request.header.flags = flags;
        let mut answers = self.handle.clone().request(request)?;
        while let Some(answer) = answers.next().await {
            if let NetlinkPayload::Error(error) = answer.payload
                && error.code.is_some()
            {
                return Err(rtnetlink::Error::NetlinkError(error));
            }
        }
        Ok(())
    }
}

fn options(rate: ByteRate) -> Vec<TcOption> {
    let burst = rate.burst(BURST_MS);
    let waiting = rate.burst(QUEUE_MS).saturating_add(burst);
    let mut parameters = [0; PARAMETERS_LENGTH];
    parameters[1] = ETHERNET;
    // Rates that need more bits are in an attribute of their own.
    let low = u32::try_from(rate.per_second).unwrap_or(u32::MAX);
    parameters[8..12].copy_from_slice(&low.to_ne_bytes());
    parameters[24..28].copy_from_slice(&waiting.to_ne_bytes());
    let option = |kind, value: Vec<u8>| TcOption::Other(DefaultNla::new(kind, value));
    vec![
        option(PARAMETERS, parameters.to_vec()),
        option(RATE64, rate.per_second.to_ne_bytes().to_vec()),
        option(BURST, burst.to_ne_bytes().to_vec()),
    ]
}
