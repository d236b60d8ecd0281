//! Tokens that have ended: none is asked of the API server for less than ten minutes, so an old one is signed anew.

use crate::bed::Bed;
use base64::Engine;
use base64::prelude::BASE64_URL_SAFE_NO_PAD;
use rcgen::{KeyPair, SigningKey};
use serde_json::{Value, json};

/// From now to the moment at which the token is made to begin, in seconds: longer than any test's token lives.
const AGO: i64 = 48 * 3600;

/// The same token as it were two days ago, with the signature that the API server trusts.
pub(crate) fn expired(bed: &Bed, token: &str) -> String {
    let [header, claims, _] = token.split('.').collect::<Vec<_>>()[..] else { panic!("no JWT: {token}") };
    let claims = BASE64_URL_SAFE_NO_PAD.decode(claims).expect("base64");
    let mut claims: Value = serde_json::from_slice(&claims).expect("JSON");
    for key in ["iat", "nbf", "exp"] {
        claims[key] = json!(claims[key].as_i64().expect("a time") - AGO);
    }
    let text = format!("{header}.{}", BASE64_URL_SAFE_NO_PAD.encode(claims.to_string()));
    let key = std::fs::read_to_string(bed.kubeconfig().with_file_name("accounts.key")).expect("a key");
    let signature = KeyPair::from_pem(&key).expect("a key").sign(text.as_bytes()).expect("a signature");
    format!("{text}.{}", BASE64_URL_SAFE_NO_PAD.encode(fixed(&signature)))
}

/// The two numbers of an ECDSA signature in ASN.1, of 32 bytes each as a JWT has them.
fn fixed(signature: &[u8]) -> [u8; 64] {
    let mut fixed = [0; 64];
    let mut rest = &signature[2..];
    for half in fixed.chunks_exact_mut(32) {
        let (number, after) = rest[2..].split_at(rest[1].into());
        let number = &number[number.len().saturating_sub(32)..];
        half[32 - number.len()..].copy_from_slice(number);
        rest = after;
    }
    fixed
}
