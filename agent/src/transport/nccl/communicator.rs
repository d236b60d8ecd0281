//! One rank of a communicator. Each state is a type: nothing can be sent before it is ready, or after a revocation,
//! and an abort consumes it. None is `Sync`: one thread at a time may be inside NCCL for a communicator.
//!
//! ```text
//! Initialising ──► Ready ──► Revoked ──► Aborted
//!       └──────────────────────┴───────► Wedged: only the end of the process frees it
//! ```

use super::symbols::{BYTES, Config, IN_PROGRESS, Nccl, NcclError, SUCCESS, UniqueId};
use crate::cuda::{Context, DeviceMemory, Stream};
use std::ffi::{c_int, c_void};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant};

/// Between two looks at a communicator that NCCL works on by itself.
const LOOK: Duration = Duration::from_micros(100);

/// A communicator that NCCL knows of. Left alone it stays: only [`Self::abort`] frees it.
#[derive(Debug)]
struct Raw {
    nccl: Nccl,
    context: Context,
    handle: *mut c_void,
}

// SAFETY: a communicator may move between threads, as long as one at a time uses it; it is not `Sync`.
unsafe impl Send for Raw {}

/// How a rank of a lane begins.
#[derive(Debug, Clone, Copy)]
pub(super) struct Join {
    pub(super) id: UniqueId,
    pub(super) rank: u32,
    pub(super) ranks: u32,
    /// Most peers of any rank.
    pub(super) degree: u32,
    pub(super) ctas_max: u32,
}

/// NCCL looks for the other ranks.
#[derive(Debug)]
pub(super) struct Initialising(Raw);

/// Bytes may move.
#[derive(Debug)]
pub(super) struct Ready(Raw);

/// What was in flight is being stopped; nothing can be sent any more.
#[derive(Debug)]
pub(super) struct Revoked(Raw);

/// It is gone: no kernel of it runs.
#[derive(Debug)]
pub(super) struct Aborted;

/// It could not be stopped in time: its memory may be written at any time, until the process ends.
#[derive(Debug)]
pub(super) struct Wedged;

impl Initialising {
    /// Begins; does not wait.
    pub(super) fn start(nccl: &Nccl, context: &Context, join: &Join) -> Result<Self, NcclError> {
        context.bind()?;
        let mut handle = std::ptr::null_mut();
        let mut config = Config::new(nccl.version(), join.degree, join.ctas_max);
        let small = |value: u32| c_int::try_from(value).unwrap_or(c_int::MAX);
        // SAFETY: writes one handle, and reads a config of the size that it states. The context is current.
        let code = unsafe {
            (nccl.symbols.init)(
                &raw mut handle,
                small(join.ranks),
                join.id,
                small(join.rank),
                &raw mut config,
            )
        };
        if code != IN_PROGRESS {
            nccl.check("ncclCommInitRankConfig", code, std::ptr::null_mut())?;
        }
        Ok(Self(Raw { nccl: nccl.clone(), context: context.clone(), handle }))
    }

    /// Whether the others are found; to be asked again while it is not.
    pub(super) fn is_ready(&self) -> Result<bool, NcclError> {
        self.0.settled("ncclCommInitRankConfig")
    }

    /// After [`Self::is_ready`] said so.
    pub(super) fn ready(self) -> Ready {
        Ready(self.0)
    }

    /// As [`Revoked::abort`].
    pub(super) fn abort(self, limit: Duration) -> Result<Aborted, Wedged> {
        self.0.abort(limit)
    }
}

impl Ready {
    /// Enqueues all that `operations` adds, as one group. The stream has it once [`Self::is_settled`] says so.
    pub(super) fn group(
        &self,
        operations: impl FnOnce(&Group<'_>) -> Result<(), NcclError>,
    ) -> Result<(), NcclError> {
        let raw = &self.0;
        raw.context.bind()?;
        // SAFETY: opens a group of this thread, which the end below closes whatever happens between.
        raw.nccl.check("ncclGroupStart", unsafe { (raw.nccl.symbols.group_start)() }, raw.handle)?;
        let added = operations(&Group(raw));
        // SAFETY: closes the group that was opened above.
        let code = unsafe { (raw.nccl.symbols.group_end)() };
        added?;
        if code != IN_PROGRESS {
            raw.nccl.check("ncclGroupEnd", code, raw.handle)?;
        }
        Ok(())
    }

    /// True once NCCL has nothing to do in the background any more; an error is the communicator's end.
    pub(super) fn is_settled(&self) -> Result<bool, NcclError> {
        self.0.settled("communicator")
    }

    /// Stops what is in flight: by a revocation, where this NCCL has one and does it in time.
    pub(super) fn revoke(self, limit: Duration) -> Revoked {
        let raw = &self.0;
        let until = Instant::now() + limit;
        if let Some(revoke) = raw.nccl.symbols.revoke {
            // SAFETY: a live communicator, and no other thread inside NCCL for it. Its result says nothing that the
            // abort would not find out.
            unsafe { revoke(raw.handle, 0) };
            while matches!(raw.settled("ncclCommRevoke"), Ok(false)) && Instant::now() < until {
                std::thread::sleep(LOOK);
            }
        }
        Revoked(self.0)
    }
}

impl Revoked {
    /// Frees it. A thread of its own does that, so that this one can give up.
    ///
    /// # Errors
    /// [`Wedged`] where it is not over within `limit`.
    pub(super) fn abort(self, limit: Duration) -> Result<Aborted, Wedged> {
        self.0.abort(limit)
    }
}

/// Sends and receives of one group.
pub(super) struct Group<'c>(&'c Raw);

impl Group<'_> {
    /// `bytes` bytes of a window to a rank.
    pub(super) fn send(
        &self,
        to: u32,
        from: &DeviceMemory,
        offset: u64,
        bytes: u64,
        stream: &Stream,
    ) -> Result<(), NcclError> {
        let (raw, address) = (self.0, from.address(offset, bytes)?);
        let to = c_int::try_from(to).unwrap_or(c_int::MAX);
        // SAFETY: the range was checked, and lives until the stream has passed this or the communicator is aborted.
        let code = unsafe {
            (raw.nccl.symbols.send)(
                address as *const c_void,
                bytes as usize,
                BYTES,
                to,
                raw.handle,
                stream.raw(),
            )
        };
        accepted(raw, "ncclSend", code)
    }

    /// `bytes` bytes from a rank to a window.
    pub(super) fn receive(
        &self,
        from: u32,
        to: &DeviceMemory,
        offset: u64,
        bytes: u64,
        stream: &Stream,
    ) -> Result<(), NcclError> {
        let (raw, address) = (self.0, to.address(offset, bytes)?);
        let from = c_int::try_from(from).unwrap_or(c_int::MAX);
        // SAFETY: as for `send`.
        let code = unsafe {
            (raw.nccl.symbols.receive)(
                address as *mut c_void,
                bytes as usize,
                BYTES,
                from,
                raw.handle,
                stream.raw(),
            )
        };
        accepted(raw, "ncclRecv", code)
    }
}

fn accepted(raw: &Raw, call: &'static str, code: u32) -> Result<(), NcclError> {
    if code == IN_PROGRESS { Ok(()) } else { raw.nccl.check(call, code, raw.handle) }
}

impl Raw {
    fn settled(&self, call: &'static str) -> Result<bool, NcclError> {
        let mut state = SUCCESS;
        // SAFETY: a live communicator; writes one integer.
        let code = unsafe { (self.nccl.symbols.async_error)(self.handle, &raw mut state) };
        self.nccl.check("ncclCommGetAsyncError", code, self.handle)?;
        match state {
            IN_PROGRESS => Ok(false),
            state => self.nccl.check(call, state, self.handle).map(|()| true),
        }
    }

    fn abort(self, limit: Duration) -> Result<Aborted, Wedged> {
        let (done, wait) = channel();
        let spawned = std::thread::Builder::new().name("nccl-abort".into()).spawn(move || {
            let raw = self;
            // NCCL sets the device that it needs; the handle is gone whatever the results are.
            let _ = raw.context.bind();
            // SAFETY: the only owner of a live communicator gives it up.
            unsafe { (raw.nccl.symbols.abort)(raw.handle) };
            // Nobody waits any more where the limit is over.
            let _ = done.send(());
        });
        match (spawned, wait.recv_timeout(limit)) {
            (Ok(_), Ok(())) => Ok(Aborted),
            (_, Ok(()) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected)) => Err(Wedged),
        }
    }
}
