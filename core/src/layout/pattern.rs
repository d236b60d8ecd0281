//! Patterns of HF names and templates of local names.

use super::error::{LayoutError, RuleId};
use crate::limits::PATTERN_BYTES_MAX;
use crate::nearest::nearest;
use regex::{Captures, Regex, RegexBuilder};

/// A regular expression that must match a whole name.
#[derive(Debug)]
pub(super) struct Pattern {
    pub(super) text: String,
    regex: Regex,
}

impl Pattern {
    pub(super) fn new(text: &str, place: &str) -> Result<Self, LayoutError> {
        let error = |error: regex::Error| LayoutError::Pattern {
            place: place.to_owned(),
            // The parser draws an arrow under the pattern over several lines; its last line says what is wrong.
            reason: error
                .to_string()
                .lines()
                .last()
                .unwrap_or_default()
                .trim()
                .trim_start_matches("error: ")
                .to_owned(),
        };
        let build = |text: &str| RegexBuilder::new(text).size_limit(PATTERN_BYTES_MAX).build();
        // Alone first: `a)|(b` would become valid inside the group below, and mean something else.
        build(text).map_err(error)?;
        let regex = build(&format!(r"\A(?:{text})\z")).map_err(error)?;
        Ok(Self { text: text.to_owned(), regex })
    }

    pub(super) fn groups(&self) -> impl Iterator<Item = &str> {
        self.regex.capture_names().flatten()
    }

    pub(super) fn has(&self, group: &str) -> bool {
        self.groups().any(|name| name == group)
    }

    pub(super) fn is_match(&self, name: &str) -> bool {
        self.regex.is_match(name)
    }

    pub(super) fn captures<'h>(&self, name: &'h str) -> Option<Captures<'h>> {
        self.regex.captures(name)
    }
}

/// Part of a local name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Part {
    Text(String),
    /// A group of the pattern.
    Group(String),
    /// `{l}`: layer within its chunk.
    LocalLayer,
    /// `{v}`: chunk.
    Chunk,
    /// `{le}`: expert within its owner.
    LocalExpert,
}

/// A local name with holes.
#[derive(Debug)]
pub(super) struct Template {
    pub(super) text: String,
    pub(super) parts: Vec<Part>,
}

impl Template {
    /// `{{` and `}}` stand for braces.
    pub(super) fn new(text: &str, pattern: &Pattern, rule: RuleId) -> Result<Self, LayoutError> {
        let brace = || LayoutError::Brace { rule, to: text.to_owned() };
        let mut parts = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            literal.push_str(&rest[..at]);
            let tail = &rest[at..];
            if tail.starts_with("{{") || tail.starts_with("}}") {
                literal.push_str(&tail[..1]);
                rest = &tail[2..];
                continue;
            }
            let end = tail.find('}').filter(|end| *end > 0).ok_or_else(brace)?;
            let name = &tail[1..end];
            rest = &tail[end + 1..];
            parts.push(Part::Text(std::mem::take(&mut literal)));
            parts.push(hole(name, pattern, rule)?);
        }
        literal.push_str(rest);
        parts.push(Part::Text(literal));
        parts.retain(|part| *part != Part::Text(String::new()));
        Ok(Self { text: text.to_owned(), parts })
    }

    /// Fills the groups; what remains open depends on the rank.
    pub(super) fn fill(
        &self,
        captures: &Captures<'_>,
        rule: RuleId,
        tensor: &str,
    ) -> Result<Vec<Part>, LayoutError> {
        let mut out: Vec<Part> = Vec::new();
        for part in &self.parts {
            let text = match part {
                Part::Text(text) => text.as_str(),
                Part::Group(group) => captures.name(group).map(|found| found.as_str()).ok_or_else(|| {
                    LayoutError::GroupUnmatched { rule, tensor: tensor.to_owned(), group: group.clone() }
                })?,
                open => {
                    out.push(open.clone());
                    continue;
                }
            };
            match out.last_mut() {
                Some(Part::Text(last)) => last.push_str(text),
                _ => out.push(Part::Text(text.to_owned())),
            }
        }
        Ok(out)
    }
}

fn hole(name: &str, pattern: &Pattern, rule: RuleId) -> Result<Part, LayoutError> {
    match name {
        "l" => Ok(Part::LocalLayer),
        "v" => Ok(Part::Chunk),
        "le" => Ok(Part::LocalExpert),
        group if pattern.has(group) => Ok(Part::Group(group.to_owned())),
        other => {
            let known = pattern.groups().chain(["l", "v", "le"]);
            let nearest = nearest(other, known).unwrap_or_default().to_owned();
            Err(LayoutError::UnknownHole { rule, hole: other.to_owned(), nearest })
        }
    }
}

/// Condition on a numeric group.
#[derive(Debug)]
pub(super) struct Only {
    pub(super) group: String,
    below: bool,
    bound: u64,
}

impl Only {
    pub(super) fn new(text: &str, rule: RuleId) -> Result<Self, LayoutError> {
        let error = || LayoutError::OnlySyntax { rule, text: text.to_owned() };
        let (below, (group, bound)) = match text.split_once(">=") {
            Some(sides) => (false, sides),
            None => (true, text.split_once('<').ok_or_else(error)?),
        };
        let is_name = !group.is_empty() && group.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
        let is_number = bound.bytes().all(|c| c.is_ascii_digit());
        match bound.parse() {
            Ok(bound) if is_name && is_number => Ok(Self { group: group.to_owned(), below, bound }),
            _ => Err(error()),
        }
    }

    pub(super) fn admits(&self, value: u64) -> bool {
        (value < self.bound) == self.below
    }

    pub(super) fn text(&self) -> String {
        format!("{}{}{}", self.group, if self.below { "<" } else { ">=" }, self.bound)
    }
}
