//! From what agents send to what the roster and the views take, with every bound checked.

use crate::limits;
use prost::Message;
use std::error::Error;
use tonic::Status;
use weightrefit_core::code::Code;
use weightrefit_core::id::{Epoch, Incarnation, Sha256};
use weightrefit_core::membership::roster::Joining;
use weightrefit_core::membership::{Seat, VersionFloor};
use weightrefit_proto::v1;

/// Protocol that this coordinator speaks.
const PROTOCOL: u32 = limits::PROTOCOL_VERSION.unsigned_abs();

/// A fault as an agent is told of it, with the remedy of its code.
#[must_use]
pub fn fault(code: Code, message: impl Into<String>) -> v1::Fault {
    v1::Fault { code: code.name().to_owned(), message: message.into(), hint: code.remedy().to_owned() }
}

/// A refusal of a whole call, with the fault in its details.
pub(super) fn status(code: tonic::Code, fault: &v1::Fault) -> Status {
    let message = format!("{}: {}; {}", fault.code, fault.message, fault.hint);
    Status::with_details(code, message, fault.encode_to_vec().into())
}

/// What is wrong with a message that was not understood; `None` where the connection ended instead.
pub(super) fn misunderstood(status: &Status) -> Option<v1::Fault> {
    let is_message = status.source().is_none();
    is_message.then(|| fault(Code::Unsupported, format!("message is not taken: {}", shown(status.message()))))
}

/// Bounds the text of a fault that an agent reports (H4).
pub(super) fn bound(fault: &mut v1::Fault) {
    [&mut fault.code, &mut fault.message, &mut fault.hint].into_iter().for_each(bound_text);
}

/// Bounds a text of an agent (H4).
pub(super) fn bound_text(text: &mut String) {
    *text = text.chars().take(limits::MESSAGE_MAX).collect();
}

/// Checks a `joining` against what the connection proved (C2). Who its pod is, the gate says.
pub(super) fn joining(pod: &str, key: Sha256, message: v1::Joining) -> Result<Joining, v1::Fault> {
    if message.pod_uid != pod {
        let text = format!("certificate names pod {pod}, the claim pod {}", shown(&message.pod_uid));
        return Err(fault(Code::Unauthenticated, text));
    }
    if !(message.protocol_min..=message.protocol_max).contains(&PROTOCOL) {
        let (min, max) = (message.protocol_min, message.protocol_max);
        let text = format!(
            "agent {} of pod {pod} speaks protocols {min} to {max}, not {PROTOCOL}",
            shown(&message.agent_version)
        );
        return Err(fault(Code::VersionSkew, text));
    }
    let bytes: [u8; 16] = message.incarnation.as_slice().try_into().map_err(|_| {
        fault(Code::Unsupported, format!("incarnation of {} bytes, 16 are needed", message.incarnation.len()))
    })?;
    if message.claims.is_empty() || message.claims.len() > limits::CLAIMS_MAX {
        let text = format!(
            "pod {pod} claims {} ranks, 1 to {} are possible",
            message.claims.len(),
            limits::CLAIMS_MAX
        );
        return Err(fault(Code::Unsupported, text));
    }
    if let Some(version) = message.version_seen.filter(|version| !is_step(version.step)) {
        return Err(fault(Code::Unsupported, format!("no status can hold step {}", version.step)));
    }
    Ok(Joining {
        incarnation: Incarnation(u128::from_be_bytes(bytes)),
        pod: message.pod_uid.clone(),
        created_s: 0,
        pod_uid: message.pod_uid,
        key,
        seats: message.claims.iter().map(seat).collect::<Result<_, _>>()?,
        round_addresses: message.round_addresses,
        byte_addresses: message.byte_addresses,
        epoch_seen: Epoch(message.epoch_seen),
        version_seen: message.version_seen.map(version_floor),
    })
}

/// Whether a Kubernetes status can hold the step.
pub(super) fn is_step(step: i64) -> bool {
    (-limits::COUNTER_MAX..=limits::COUNTER_MAX).contains(&step)
}

/// The largest version that an agent knows of.
pub(super) fn version_floor(name: v1::VersionName) -> VersionFloor {
    VersionFloor { run: name.run, step: name.step }
}

/// The seat of a claim.
pub(super) fn seat(claim: &v1::Claim) -> Result<Seat, v1::Fault> {
    claim.seat().ok_or_else(|| {
        let text = format!("side `{}` is neither training nor inference", shown(&claim.side));
        fault(Code::Unsupported, text)
    })
}

/// Text of a peer, short enough for a message.
pub(super) fn shown(text: &str) -> String {
    text.chars().take(80).collect()
}
