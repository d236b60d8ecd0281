//! How one authority follows another without anybody being refused meanwhile. What holds at a moment follows from dates
//! alone, those of the certificates and the one that is kept beside them, so all replicas of an operator agree on it
//! without a word.
//!
//! Invariants:
//! - H1: a successor signs a day after it was made at the earliest, and not before every namespace with pods of refits has
//!   had its certificate for as long as a kubelet needs to mount it. Only when its predecessor has ended it signs all the
//!   same: then nobody else can.
//! - H2: the predecessor is trusted until the last certificate that it signed has ended, and an hour longer.

use super::authority::{CLOCK_SKEW, LEAF_LIFETIME};
use super::{Authority, IdentityError};
use rustls::pki_types::CertificateDer;
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use tokio::sync::watch;

/// Time between a successor's making and its first signature. A kubelet renews mounted files within two minutes, an
/// operator that lost its watch begins it anew within five; the rest is for those who look first.
const ANNOUNCED: Duration = Duration::from_secs(24 * 60 * 60);

/// Time between a successor's certificate in every namespace and its first signature, where the day is over by then: five
/// times what a kubelet takes to renew mounted files. Agents read them anew whenever they dial.
const MOUNTED: Duration = Duration::from_secs(10 * 60);

/// Time from a successor's first signature until its predecessor is trusted no more (H2).
const OVERLAP: Duration = Duration::from_secs(LEAF_LIFETIME.as_secs() + CLOCK_SKEW.as_secs() + 60 * 60);

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
    /// Since when every namespace with pods of refits has the younger one's certificate; `None` while some lacks it.
    pub(super) announced: Option<SystemTime>,
}

/// Whether both say the same, whenever it was announced.
impl PartialEq for Succession {
    fn eq(&self, other: &Self) -> bool {
        let next = |of: &Self| of.next.as_ref().map(|next| next.certificate().clone());
        self.present.certificate() == other.present.certificate()
            && next(self) == next(other)
            && self.announced.is_some() == other.announced.is_some()
    }
}

impl Succession {
    /// An authority without a successor.
    ///
    /// # Errors
    /// No key can be made.
    pub fn begin() -> Result<Self, IdentityError> {
        Ok(Self { present: Arc::new(Authority::generate()?), next: None, announced: None })
    }

    /// What holds now.
    #[must_use]
    pub fn at(&self, now: SystemTime) -> Trust {
        let (present, has_ended) = (&self.present, now >= self.present.until());
        let Some(next) = self.successor() else {
            return Trust { signer: Arc::clone(present), trusted: vec![Arc::clone(present)] };
        };
        let signs = has_ended || self.signs_from(next).is_some_and(|from| now >= from);
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
            return Ok(Some(Self { present: Arc::clone(&self.present), next, announced: None }));
        };
        let promoted = Self { present: Arc::clone(next), next: None, announced: None };
        Ok((now >= self.present.until() || self.is_over(next, now)).then_some(promoted))
    }

    /// The same with its successor announced in every namespace from now on; `None` where it is already, or has none.
    #[must_use]
    pub fn announced(&self, now: SystemTime) -> Option<Self> {
        let next = self.successor()?;
        self.announced_at(next).is_none().then(|| Self { announced: Some(now), ..self.clone() })
    }

    /// Whether the successor signs although some namespace lacks its certificate (H1).
    #[must_use]
    pub fn is_forced(&self, now: SystemTime) -> bool {
        let is_unknown = |next: &Arc<Authority>| self.announced_at(next).is_none();
        now >= self.present.until() && self.successor().is_some_and(is_unknown)
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

    /// What is said of another one that was there before says nothing of this one.
    fn announced_at(&self, next: &Authority) -> Option<SystemTime> {
        self.announced.filter(|announced| *announced >= next.since())
    }

    /// H1, while the predecessor lasts.
    fn signs_from(&self, next: &Authority) -> Option<SystemTime> {
        Some((next.since() + ANNOUNCED).max(self.announced_at(next)? + MOUNTED))
    }

    fn is_over(&self, next: &Authority, now: SystemTime) -> bool {
        self.signs_from(next).is_some_and(|from| now >= from + OVERLAP)
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

    /// When the successor was made and was announced everywhere, and now, in seconds; who signs, who is trusted.
    type Row = (Option<u64>, Option<u64>, u64, &'static str, &'static str);

    #[test]
    fn a_successor_is_trusted_a_day_before_it_signs_and_its_predecessor_until_its_last_signature_has_ended() {
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_900_000_000);
        let end = after(start, 365 * DAY);
        let next = |seconds| Some(Arc::new(made_at(after(start, seconds), after(end, 365 * DAY))));
        let rows: [Row; 14] = [
            (None, None, 0, "P", "P"),
            (None, None, 366 * DAY, "P", "P"), // nobody else is there to sign
            (Some(300 * DAY), None, 300 * DAY, "P", "PN"),
            (Some(300 * DAY), Some(300 * DAY + 60), 301 * DAY - 1, "P", "PN"),
            (Some(300 * DAY), Some(300 * DAY + 60), 301 * DAY, "N", "PN"),
            (Some(300 * DAY), Some(300 * DAY + 60), 302 * DAY + HOUR, "N", "PN"), // pods' clocks may be behind
            (Some(300 * DAY), Some(300 * DAY + 60), 302 * DAY + HOUR + 300, "N", "N"),
            // Some namespace lacks its certificate for long, or for ever.
            (Some(300 * DAY), Some(310 * DAY), 310 * DAY + 599, "P", "PN"),
            (Some(300 * DAY), Some(310 * DAY), 310 * DAY + 600, "N", "PN"),
            (Some(300 * DAY), Some(310 * DAY), 311 * DAY + HOUR + 900, "N", "N"),
            (Some(300 * DAY), None, 365 * DAY - 1, "P", "PN"),
            (Some(300 * DAY), Some(299 * DAY), 364 * DAY, "P", "PN"), // that was another one
            (Some(364 * DAY + 20 * HOUR), Some(364 * DAY + 20 * HOUR), 365 * DAY - 1, "P", "PN"),
            (Some(364 * DAY + 20 * HOUR), None, 365 * DAY, "N", "N"), // an end waits for nobody
        ];
        for (made, announced, now, signer, trusted) in rows {
            let announced = announced.map(|seconds| after(start, seconds));
            let succession =
                Succession { present: Arc::new(made_at(start, end)), next: made.and_then(next), announced };
            let now = after(start, now);
            let what = format!("made at {made:?}, announced at {announced:?}, seen at {now:?}");
            assert_eq!(shown(&succession, now), (signer, trusted.to_owned()), "{what}");
            let is_forced =
                signer == "N" && succession.announced_at(&succession.next.clone().unwrap()).is_none();
            assert_eq!(succession.is_forced(now), is_forced, "{what}");
        }
    }

    #[test]
    fn a_successor_is_announced_once() {
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_900_000_000);
        let made = |seconds| Arc::new(made_at(after(start, seconds), after(start, 365 * DAY)));
        let alone = Succession { present: made(0), next: None, announced: None };
        assert!(alone.announced(after(start, DAY)).is_none());
        let made = Succession { next: Some(made(10)), ..alone };
        let announced = made.announced(after(start, DAY)).expect("not yet announced");
        assert_eq!(announced.announced, Some(after(start, DAY)));
        assert!(announced != made && announced.announced(after(start, 2 * DAY)).is_none());
    }

    #[test]
    fn a_successor_is_made_at_two_thirds_and_takes_its_predecessors_place_when_that_is_over() {
        let start = SystemTime::UNIX_EPOCH + Duration::from_secs(1_500_000_000);
        let end = after(start, 300 * DAY);
        let present = || Arc::new(made_at(start, end));
        let alone = Succession { present: present(), next: None, announced: None };
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
        let replaced = Succession { present: present(), next: older, announced: None };
        assert_eq!(shown(&replaced, after(start, 10 * DAY)), ("P", "P".to_owned()));
        let due = replaced.due(after(start, 200 * DAY), None).unwrap().expect("a successor of its own");
        assert!(due.next.is_some_and(
            |next| Some(next.certificate()) != replaced.next.as_ref().map(|of| of.certificate())
        ));

        let next = Arc::new(made_at(after(start, 200 * DAY), after(end, 300 * DAY)));
        let announced = Some(after(start, 200 * DAY));
        let both = Succession { present: present(), next: Some(Arc::clone(&next)), announced };
        for (now, is_due) in [(201 * DAY, false), (202 * DAY, false), (203 * DAY, true), (300 * DAY, true)] {
            let due = both.due(after(start, now), None).unwrap();
            assert_eq!(due.is_some(), is_due, "{now}");
            let Some(due) = due else { continue };
            assert_eq!(due.present.certificate(), next.certificate());
            assert!(due.next.is_none());
        }
    }
}
