//! What an agent and an executor in a rank's own process say to each other: orders from the agent, and what came of
//! them. A lane is one communicator, by a number that the agent gives; what is said of an attempt or a run that is
//! over changes nothing.

use serde::{Deserialize, Serialize};
use std::fmt;
use weightrefit_core::code::Code;
use weightrefit_core::round::message::RoundKey;

/// Form of the tables that [`Order::Tables`] passes. An executor and an agent of different forms do not work together.
pub const TABLES: u32 = 1;

/// What an executor has to work with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// UUID of its GPU, as NVIDIA's tools print it.
    pub gpu: String,
    /// Version of its NCCL, as that counts.
    pub nccl: u32,
    /// Whether NCCL may put it on a GPU with another rank.
    pub shares_gpu: bool,
    /// Device memory for packed windows of one lane, in bytes.
    pub window_bytes: u64,
}

/// An id of a communicator in hexadecimal digits: whoever has it can join, so it is never shown.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LaneId(pub String);

impl fmt::Debug for LaneId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LaneId(secret)")
    }
}

/// One table of a lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Table {
    /// Rank in the lane of the peer that it is for.
    pub peer: u32,
    /// Its bytes; the tables lie one after the other in the descriptor.
    pub bytes: u64,
}

/// From an agent to an executor.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase", deny_unknown_fields)]
#[expect(missing_docs, reason = "fields are named by the vocabulary and explained at their variant")]
pub enum Order {
    /// Mint an id; the process must live until all have joined.
    Mint { request: u64 },
    /// The rank's memories from number `first` on, in order: sizes here, sealed memfds as descriptors. A `set` that is
    /// new takes the place of the one before. Staging is `writable`.
    Memory { set: u64, first: u32, bytes: Vec<u64>, writable: bool },
    /// What goes between memory and peers from the next run on, on one descriptor: for each peer as many entries of the
    /// kernels' table as its bytes are, where an address is an offset and the last word says in which memory.
    Tables { lane: u64, tables: Vec<Table> },
    /// Join an attempt, after the end of the one before.
    Form {
        lane: u64,
        attempt: u32,
        id: LaneId,
        rank: u32,
        ranks: u32,
        degree: u32,
        ctas_max: u32,
        chunk_bytes: u64,
    },
    /// Move the bytes of a round with these peers: send where `send` names the round of a publication, else receive.
    Run {
        lane: u64,
        attempt: u32,
        run: u64,
        send: Option<RoundKey>,
        set: u64,
        peers: Vec<u32>,
        timeout_ms: u64,
    },
    /// End an attempt, whatever it is doing.
    Abort { lane: u64, attempt: u32 },
    /// End the lane, and forget its tables.
    Close { lane: u64 },
}

/// From an executor to its agent.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase", deny_unknown_fields)]
#[expect(missing_docs, reason = "fields are named by the vocabulary and explained at their variant")]
pub enum Said {
    /// An id.
    Minted { request: u64, id: LaneId },
    /// There is none.
    NotMinted { request: u64, code: Code, message: String },
    /// It has found the others.
    Formed { lane: u64, attempt: u32 },
    /// It has not.
    NotFormed { lane: u64, attempt: u32, code: Code, message: String },
    /// Bytes of a run so far.
    Moved { lane: u64, run: u64, bytes: u64 },
    /// All bytes of a run are where they belong, and nothing of it runs any more.
    Ran { lane: u64, run: u64, bytes: u64 },
    /// A run failed, and with it its attempt; nothing of either runs any more, unless `wedged` was said.
    NotRan { lane: u64, run: u64, code: Code, message: String },
    /// Nothing of an attempt runs any more.
    Aborted { lane: u64, attempt: u32 },
    /// A communicator could not be ended in time. Nothing more can be done in this process: what it has on the device
    /// is never used again.
    Wedged { message: String },
}
