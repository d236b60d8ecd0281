//! One-time enrolment tokens of a coordinator without Kubernetes: each is bound to one pod and used once.

use std::collections::BTreeMap;
use std::sync::Mutex;

/// Bytes of a token: 256 random bits cannot be guessed.
const TOKEN_BYTES: usize = 32;

/// Tokens handed out and not used yet, by pod UID. A pod has at most one: a newer replaces it.
#[derive(Default)]
pub struct Tokens {
    unused: Mutex<BTreeMap<String, [u8; TOKEN_BYTES]>>,
}

impl Tokens {
    /// A new token for a pod, as hexadecimal text. Fails when the system gives no randomness.
    pub fn issue(&self, pod_uid: &str) -> Result<String, getrandom::Error> {
        let mut token = [0; TOKEN_BYTES];
        getrandom::fill(&mut token)?;
        let text = token.iter().map(|byte| format!("{byte:02x}")).collect();
        self.unused.lock().expect("no holder of this lock panics").insert(pod_uid.to_owned(), token);
        Ok(text)
    }

    /// Uses up the token of a pod; false, and nothing changes, where it is not that pod's.
    #[must_use]
    pub fn redeem(&self, pod_uid: &str, text: &str) -> bool {
        let mut unused = self.unused.lock().expect("no holder of this lock panics");
        let Some(wanted) = unused.get(pod_uid) else { return false };
        let matches = parse(text).is_some_and(|given| equal(&given, wanted));
        if matches {
            unused.remove(pod_uid);
        }
        matches
    }
}

fn parse(text: &str) -> Option<[u8; TOKEN_BYTES]> {
    let (pairs, rest) = text.as_bytes().as_chunks::<2>();
    if pairs.len() != TOKEN_BYTES || !rest.is_empty() {
        return None;
    }
    let mut token = [0; TOKEN_BYTES];
    for (byte, [high, low]) in token.iter_mut().zip(pairs) {
        let digit = |c: u8| char::from(c).to_digit(16).and_then(|digit| u8::try_from(digit).ok());
        *byte = digit(*high)? << 4 | digit(*low)?;
    }
    Some(token)
}

/// Takes the same time wherever the two differ.
fn equal(a: &[u8; TOKEN_BYTES], b: &[u8; TOKEN_BYTES]) -> bool {
    std::hint::black_box(a.iter().zip(b).fold(0, |differs, (x, y)| differs | (x ^ y))) == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_accepted_once_and_only_for_its_pod() {
        let tokens = Tokens::default();
        let (a, b) = (tokens.issue("a").unwrap(), tokens.issue("b").unwrap());
        assert!(!tokens.redeem("a", &b));
        assert!(!tokens.redeem("c", &a));
        assert!(tokens.redeem("a", &a));
        assert!(!tokens.redeem("a", &a));
        assert!(tokens.redeem("b", &b));
    }

    #[test]
    fn every_changed_digit_is_refused_and_leaves_the_token_usable() {
        let tokens = Tokens::default();
        let token = tokens.issue("a").unwrap();
        for place in 0..token.len() {
            let mut changed = token.clone().into_bytes();
            changed[place] = if changed[place] == b'0' { b'1' } else { b'0' };
            assert!(!tokens.redeem("a", std::str::from_utf8(&changed).unwrap()), "digit {place}");
        }
        for text in ["", "00", &token[1..], &format!("{token}0"), &format!("{token}00"), "ü"] {
            assert!(!tokens.redeem("a", text), "{text}");
        }
        assert!(tokens.redeem("a", &token));
    }

    #[test]
    fn a_newer_token_replaces_an_unused_one() {
        let tokens = Tokens::default();
        let old = tokens.issue("a").unwrap();
        let new = tokens.issue("a").unwrap();
        assert!(!tokens.redeem("a", &old));
        assert!(tokens.redeem("a", &new));
    }
}
