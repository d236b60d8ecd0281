//! How one authority follows another without anybody being refused meanwhile. What holds at a moment follows from the
//! dates of the certificates alone, so all replicas of an operator agree on it without a word.
//!
//! A successor is announced for a day before it signs: by then every pod has its certificate beside the present one.
//! The predecessor is trusted until the last certificate that it signed has ended, and an hour longer.

use super::authority::{CLOCK_SKEW, LEAF_LIFETIME};
use super::{Authority, IdentityError};
use rustls::pki_types::CertificateDer;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::watch;

/// Time between a successor's making and its first signature. A kubelet renews mounted files within two minutes, an
/// operator that lost its watch begins it anew within five; the rest is for those who look first.
const ANNOUNCED: Duration = Duration::from_secs(24 * 60 * 60);

/// Time from a successor's making until its predecessor is trusted no more.
const OVERLAP: Duration =
    Duration::from_secs(ANNOUNCED.as_secs() + LEAF_LIFETIME.as_secs() + CLOCK_SKEW.as_secs() + 60 * 60);

/// The authority that signs at one moment, and the certificates that are trusted at that moment.
#[derive(Clone)]
pub struct Trust {
    signer: Arc<Authority>,
    trusted: Vec<Arc<Authority>>,
}

impl Trust {
    /// One authority without a successor, for as long as its process lives.
    #[must_use]
    pub fn alone(authority: Authority) -> watch::Receiver<Self> {
        let signer = Arc::new(authority);
        watch::channel(Self { trusted: vec![Arc::clone(&signer)], signer }).1
    }

    /// Who signs.
    #[must_use]
    pub fn signer(&self) -> &Authority {
        &self.signer
    }

    /// Certificates of the authorities that are trusted, oldest first, DER.
    pub fn certificates(&self) -> impl Iterator<Item = &CertificateDer<'static>> {
        self.trusted.iter().map(|authority| authority.certificate())
    }

    /// The same as PEM, for the file that agents are given.
    #[must_use]
    pub fn bundle_pem(&self) -> String {
        self.trusted.iter().map(|authority| authority.certificate_pem()).collect()
    }
}

impl PartialEq for Trust {
    fn eq(&self, other: &Self) -> bool {
        self.signer.certificate() == other.signer.certificate()
            && self.certificates().eq(other.certificates())
    }
}

/// An authority and, where it has one, its successor.
#[derive(Clone)]
pub struct Succession {
    /// The older.
    pub(super) present: Arc<Authority>,
    /// The younger.
    pub(super) next: Option<Arc<Authority>>,
}

impl PartialEq for Succession {
    fn eq(&self, other: &Self) -> bool {
        let next = |of: &Self| of.next.as_ref().map(|next| next.certificate().clone());
        self.present.certificate() == other.present.certificate() && next(self) == next(other)
    }
}

impl Succession {
    /// An authority without a successor.
    ///
    /// # Errors
    /// No key can be made.
    pub fn begin() -> Result<Self, IdentityError> {
        Ok(Self { present: Arc::new(Authority::generate()?), next: None })
    }

    /// What holds now.
    #[must_use]
    pub fn at(&self, now: SystemTime) -> Trust {
        let (present, has_ended) = (&self.present, now >= self.present.until());
        let Some(next) = self.successor() else {
            return Trust { signer: Arc::clone(present), trusted: vec![Arc::clone(present)] };
        };
        let signs = has_ended || now >= next.since() + ANNOUNCED;
        let mut trusted = vec![Arc::clone(present), Arc::clone(next)];
        if has_ended || self.is_over(next, now) {
            trusted.remove(0);
        }
        Trust { signer: Arc::clone(if signs { next } else { present }), trusted }
    }

    /// What must be kept from now on instead: with a successor when a third of the present authority's life is left,
    /// without the predecessor when it is trusted no more. `None` where nothing changes. A successor that `made` has for
    /// the present authority is taken again.
    ///
    /// # Errors
    /// No key can be made.
    pub fn due(&self, now: SystemTime, made: Option<&Self>) -> Result<Option<Self>, IdentityError> {
        let Some(next) = self.successor() else {
            let life = self.present.until().duration_since(self.present.since()).unwrap_or_default();
            let is_due = now >= self.present.until() - life / 3;
            if !is_due {
                return Ok(None);
            }
            if let Some(made) = made.filter(|made| made.continues(self)) {
                return Ok(Some(made.clone()));
            }
            let next = Some(Arc::new(Authority::generate()?));
            return Ok(Some(Self { present: Arc::clone(&self.present), next }));
        };
        let promoted = Self { present: Arc::clone(next), next: None };
        Ok((now >= self.present.until() || self.is_over(next, now)).then_some(promoted))
    }

    /// Whether this gives an authority without a successor one.
    #[must_use]
    pub fn continues(&self, alone: &Self) -> bool {
        self.present.certificate() == alone.present.certificate()
            && !alone.has_successor()
            && self.has_successor()
    }

    /// Whether the younger one is there.
    #[must_use]
    pub fn has_successor(&self) -> bool {
        self.successor().is_some()
    }

    /// The younger one. What somebody has put in the place of both is followed by neither.
    fn successor(&self) -> Option<&Arc<Authority>> {
        self.next.as_ref().filter(|next| next.since() >= self.present.since())
    }

    fn is_over(&self, next: &Authority, now: SystemTime) -> bool {
        now >= next.since() + OVERLAP
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::authority::made_at;

    const HOUR: u64 = 60 * 60;
    const DAY: u64 = 24 * HOUR;

    fn after(start: SystemTime, seconds: u64) -> SystemTime {
        start + Duration::from_secs(seconds)
    }

    /// Both as letters: who signs, who is trusted.
    fn shown(succession: &Succession, now: SystemTime) -> (&'static str, String) {
        let letter = |certificate: &CertificateDer<'_>| match certificate == succession.present.certificate()
        {
            true => "P",
            false => "N",
        };
        let trust = succession.at(now);
        (letter(trust.signer().certificate()), trust.certificates().map(letter).collect())
    }

    #[test]
    fn a_successor_is_trusted_a_day_before_it_signs_and_its_predecessor_until_its_last_signature_has_ended() {
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_900_000_000);
        let end = after(start, 365 * DAY);
        let next = |seconds| Some(Arc::new(made_at(after(start, seconds), after(end, 365 * DAY))));
        let rows: [(Option<u64>, u64, &str, &str); 9] = [
            (None, 0, "P", "P"),
            (None, 366 * DAY, "P", "P"), // nobody else is there to sign
            (Some(300 * DAY), 300 * DAY, "P", "PN"),
            (Some(300 * DAY), 301 * DAY - 1, "P", "PN"),
            (Some(300 * DAY), 301 * DAY, "N", "PN"),
            (Some(300 * DAY), 302 * DAY + HOUR, "N", "PN"), // pods' clocks may be behind
            (Some(300 * DAY), 302 * DAY + HOUR + 300, "N", "N"),
            (Some(364 * DAY + 20 * HOUR), 365 * DAY - 1, "P", "PN"),
            (Some(364 * DAY + 20 * HOUR), 365 * DAY, "N", "N"), // too late for a day, but not for an end
        ];
        for (made, now, signer, trusted) in rows {
            let succession = Succession { present: Arc::new(made_at(start, end)), next: made.and_then(next) };
            let got = shown(&succession, after(start, now));
            assert_eq!(got, (signer, trusted.to_owned()), "made at {made:?}, seen at {now}");
        }
    }

    #[test]
    fn a_successor_is_made_at_two_thirds_and_takes_its_predecessors_place_when_that_is_over() {
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_500_000_000);
        let end = after(start, 300 * DAY);
        let present = || Arc::new(made_at(start, end));
        let alone = Succession { present: present(), next: None };
        for (now, is_due) in [(0, false), (200 * DAY - 1, false), (200 * DAY, true), (400 * DAY, true)] {
            let due = alone.due(after(start, now), None).unwrap();
            assert_eq!(due.is_some(), is_due, "{now}");
            let Some(due) = due else { continue };
            assert_eq!(due.present.certificate(), alone.present.certificate());
            assert!(due.next.is_some());
            let again = alone.due(after(start, now), Some(&due)).unwrap().expect("still due");
            assert!(again == due, "the same successor");
        }
        // Somebody has put another in the place of the predecessor.
        let older = Some(Arc::new(made_at(start - Duration::from_secs(DAY), end)));
        let replaced = Succession { present: present(), next: older };
        assert_eq!(shown(&replaced, after(start, 10 * DAY)), ("P", "P".to_owned()));
        let due = replaced.due(after(start, 200 * DAY), None).unwrap().expect("a successor of its own");
        assert!(due.next.is_some_and(
            |next| Some(next.certificate()) != replaced.next.as_ref().map(|of| of.certificate())
        ));

        let next = Arc::new(made_at(after(start, 200 * DAY), after(end, 300 * DAY)));
        let both = Succession { present: present(), next: Some(Arc::clone(&next)) };
        for (now, is_due) in [(201 * DAY, false), (202 * DAY, false), (203 * DAY, true), (300 * DAY, true)] {
            let due = both.due(after(start, now), None).unwrap();
            assert_eq!(due.is_some(), is_due, "{now}");
            let Some(due) = due else { continue };
            assert_eq!(due.present.certificate(), next.certificate());
            assert!(due.next.is_none());
        }
    }
}
