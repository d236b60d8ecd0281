//! Streams and events.

use super::symbols::{NOT_READY, SUCCESS, Symbols};
use super::{Context, CudaError, Handle};

/// `CU_STREAM_NON_BLOCKING`: does not wait for what others enqueue on the default stream.
const NON_BLOCKING: u32 = 1;
/// `CU_EVENT_DISABLE_TIMING`: an event that only orders is cheaper.
const ORDER_ONLY: u32 = 2;

/// Work of a device, in order.
#[derive(Debug)]
pub struct Stream {
    context: Context,
    raw: Handle,
}

// SAFETY: a stream may be used from any thread, one at a time.
unsafe impl Send for Stream {}

impl Stream {
    /// A stream of the lowest priority: serving comes first.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let (mut least, mut greatest, mut raw) = (0, 0, std::ptr::null_mut());
        context.call("cuCtxGetStreamPriorityRange", |symbols| match symbols.priority_range {
            // SAFETY: writes two integers; the context is current.
            Some(range) => unsafe { range(&raw mut least, &raw mut greatest) },
            None => SUCCESS,
        })?;
        // SAFETY: writes one handle; the context is current.
        context.call("cuStreamCreate", |symbols| unsafe {
            (symbols.stream_create)(&raw mut raw, NON_BLOCKING, least)
        })?;
        Ok(Self { context: context.clone(), raw })
    }

    /// True once all that was enqueued is done.
    ///
    /// # Errors
    /// What the work ended with.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: a live stream; the context is current.
        done(&self.context, "cuStreamQuery", |symbols| unsafe { (symbols.stream_query)(self.raw) })
    }

    /// What is enqueued from now on waits for `event`.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: live handles of one context.
        self.context
            .call("cuStreamWaitEvent", |symbols| unsafe { (symbols.stream_wait)(self.raw, event.raw, 0) })
    }

    /// Its context.
    pub(crate) fn context(&self) -> &Context {
        &self.context
    }

    pub(crate) fn raw(&self) -> Handle {
        self.raw
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by `new` and destroyed once; work that is left goes on without it (C4).
        self.context.raw_call(|symbols| unsafe { (symbols.stream_destroy)(self.raw) });
    }
}

/// A place in a stream.
#[derive(Debug)]
pub struct Event {
    context: Context,
    raw: Handle,
}

// SAFETY: an event may be used from any thread, one at a time.
unsafe impl Send for Event {}

impl Event {
    /// Nowhere yet, which counts as done.
    pub fn new(context: &Context) -> Result<Self, CudaError> {
        let mut raw = std::ptr::null_mut();
        let handle = &raw mut raw;
        // SAFETY: writes one handle; the context is current.
        context.call("cuEventCreate", |symbols| unsafe { (symbols.event_create)(handle, ORDER_ONLY) })?;
        Ok(Self { context: context.clone(), raw })
    }

    /// After all that is enqueued now.
    pub fn record(&self, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: live handles of one context.
        self.context.call("cuEventRecord", |symbols| unsafe { (symbols.event_record)(self.raw, stream.raw) })
    }

    /// True once the stream has passed it.
    ///
    /// # Errors
    /// What the work ended with.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        // SAFETY: a live event; the context is current.
        done(&self.context, "cuEventQuery", |symbols| unsafe { (symbols.event_query)(self.raw) })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `new` and destroyed once.
        self.context.raw_call(|symbols| unsafe { (symbols.event_destroy)(self.raw) });
    }
}

fn done(
    context: &Context,
    name: &'static str,
    query: impl FnOnce(&Symbols) -> u32,
) -> Result<bool, CudaError> {
    match context.raw_call(query) {
        NOT_READY => Ok(false),
        code => context.call(name, |_| code).map(|()| true),
    }
}
