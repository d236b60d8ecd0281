//! Integer expressions of a document: numbers, names of `vars`, `+ * / ( )`.
//!
//! Invariants:
//! - X1: a value is a `u64` and no step overflows; there is no subtraction, so nothing is negative.
//! - X2: `/` is the integer floor; division by zero is an error.

use crate::limits::EXPRESSION_BYTES_MAX;
use crate::nearest::nearest;
use std::collections::BTreeMap;

/// Why an expression has no value.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ExpressionError {
    /// Longer than [`EXPRESSION_BYTES_MAX`].
    #[error("it has {0} bytes, at most {EXPRESSION_BYTES_MAX} are read")]
    TooLong(usize),
    /// A character outside the grammar; `-` is the usual one.
    #[error("character `{0}` is not one of `+ * / ( )`, a digit or a letter")]
    Character(char),
    /// A number or name was expected.
    #[error("a number, a name or `(` is missing at its byte {0}")]
    Operand(usize),
    /// Something follows a complete expression, or a parenthesis is not closed.
    #[error("an operator or `)` is missing at its byte {0}")]
    Operator(usize),
    /// A number with a leading zero, or one that does not fit 64 bits.
    #[error("`{0}` is not an integer of 64 bits without leading zero")]
    Number(String),
    /// No such variable.
    #[error("`vars` has no `{name}`{}", nearest.as_ref().map_or(String::new(), |n| format!(", nearest is `{n}`")))]
    Name {
        /// The name that is not known.
        name: String,
        /// The known name nearest to it.
        nearest: Option<String>,
    },
    /// The right side of a `/` is 0.
    #[error("it divides by zero")]
    DivisionByZero,
    /// A step does not fit 64 bits.
    #[error("its value does not fit 64 bits")]
    Overflow,
}

/// The value of `text` with these variables.
pub(super) fn evaluate(text: &str, vars: &BTreeMap<String, u64>) -> Result<u64, ExpressionError> {
    if text.len() > EXPRESSION_BYTES_MAX {
        return Err(ExpressionError::TooLong(text.len()));
    }
    let known = |c: char| c.is_ascii_alphanumeric() || "_+*/() ".contains(c);
    if let Some(other) = text.chars().find(|c| !known(*c)) {
        return Err(ExpressionError::Character(other));
    }
    let mut parser = Parser { text: text.as_bytes(), at: 0, vars };
    let value = parser.sum()?;
    if parser.peek().is_some() {
        return Err(ExpressionError::Operator(parser.at));
    }
    Ok(value)
}

struct Parser<'a> {
    text: &'a [u8],
    at: usize,
    vars: &'a BTreeMap<String, u64>,
}

impl Parser<'_> {
    fn peek(&mut self) -> Option<u8> {
        while self.text.get(self.at) == Some(&b' ') {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    fn sum(&mut self) -> Result<u64, ExpressionError> {
        let mut value = self.product()?;
        while self.peek() == Some(b'+') {
            self.at += 1;
            value = value.checked_add(self.product()?).ok_or(ExpressionError::Overflow)?;
        }
        Ok(value)
    }

    fn product(&mut self) -> Result<u64, ExpressionError> {
        let mut value = self.operand()?;
        while let Some(operator @ (b'*' | b'/')) = self.peek() {
            self.at += 1;
            let right = self.operand()?;
            value = match operator {
                b'*' => value.checked_mul(right).ok_or(ExpressionError::Overflow)?,
                _ => value.checked_div(right).ok_or(ExpressionError::DivisionByZero)?,
            };
        }
        Ok(value)
    }

    fn operand(&mut self) -> Result<u64, ExpressionError> {
        match self.peek() {
            Some(b'(') => {
                self.at += 1;
                let value = self.sum()?;
                if self.peek() != Some(b')') {
                    return Err(ExpressionError::Operator(self.at));
                }
                self.at += 1;
                Ok(value)
            }
            Some(c) if c.is_ascii_alphanumeric() || c == b'_' => self.word(),
            _ => Err(ExpressionError::Operand(self.at)),
        }
    }

    fn word(&mut self) -> Result<u64, ExpressionError> {
        let rest = &self.text[self.at..];
        let len = rest.iter().take_while(|c| c.is_ascii_alphanumeric() || **c == b'_').count();
        let word = String::from_utf8_lossy(&rest[..len]).into_owned();
        self.at += len;
        if !word.starts_with(|c: char| c.is_ascii_digit()) {
            let names = || self.vars.keys().map(String::as_str);
            let missing = || ExpressionError::Name {
                nearest: nearest(&word, names()).map(str::to_owned),
                name: word.clone(),
            };
            return self.vars.get(&word).copied().ok_or_else(missing);
        }
        match word.parse() {
            Ok(value) if word == "0" || !word.starts_with('0') => Ok(value),
            _ => Err(ExpressionError::Number(word)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_and_errors() {
        let vars = BTreeMap::from([("nq".to_owned(), 64), ("nkv".to_owned(), 4), ("d".to_owned(), 128)]);
        for (text, want) in [
            ("nq/nkv*d", "2048"),
            ("7 / 2", "3"),
            ("2+3*(4+1)", "17"),
            ("((((((((1))))))))", "1"),
            ("0", "0"),
            ("d/(nq/128)", "it divides by zero"),
            ("d-1", "character `-` is not one of `+ * / ( )`, a digit or a letter"),
            ("nkw*2", "`vars` has no `nkw`, nearest is `nkv`"),
            ("18446744073709551615+1", "its value does not fit 64 bits"),
            (
                "18446744073709551616",
                "`18446744073709551616` is not an integer of 64 bits without leading zero",
            ),
            ("010", "`010` is not an integer of 64 bits without leading zero"),
            ("(1", "an operator or `)` is missing at its byte 2"),
            ("1 2", "an operator or `)` is missing at its byte 2"),
            ("1+", "a number, a name or `(` is missing at its byte 2"),
            ("", "a number, a name or `(` is missing at its byte 0"),
        ] {
            let got = evaluate(text, &vars).map_or_else(|e| e.to_string(), |v| v.to_string());
            assert_eq!(got, want, "{text}");
        }
    }
}
