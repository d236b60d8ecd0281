//! JSON for programs that people can read too: indented down to a depth, one line each below it.

use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};
use std::io::{self, Write};

/// Writes `value`, whose containers are broken into lines down to `depth` (1 is the outermost).
pub(crate) fn write(out: impl Write, value: &impl Serialize, depth: usize) -> serde_json::Result<()> {
    let lines = Lines { depth, open: 0, empty: true };
    value.serialize(&mut Serializer::with_formatter(out, lines))
}

struct Lines {
    depth: usize,
    open: usize,
    empty: bool,
}

impl Lines {
    fn begin(&mut self, out: &mut (impl Write + ?Sized), bracket: &[u8]) -> io::Result<()> {
        self.open += 1;
        self.empty = true;
        out.write_all(bracket)
    }

    fn end(&mut self, out: &mut (impl Write + ?Sized), bracket: &[u8]) -> io::Result<()> {
        self.open -= 1;
        if self.open < self.depth && !self.empty {
            self.line(out)?;
        }
        self.empty = false;
        out.write_all(bracket)
    }

    fn item(&mut self, out: &mut (impl Write + ?Sized), first: bool) -> io::Result<()> {
        self.empty = false;
        let broken = self.open <= self.depth;
        match (first, broken) {
            (true, false) => Ok(()),
            (true, true) => self.line(out),
            (false, false) => out.write_all(b", "),
            (false, true) => out.write_all(b",").and_then(|()| self.line(out)),
        }
    }

    fn line(&self, out: &mut (impl Write + ?Sized)) -> io::Result<()> {
        out.write_all(b"\n")?;
        (0..self.open).try_for_each(|_| out.write_all(b"  "))
    }
}

impl Formatter for Lines {
    fn begin_array<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"[")
    }

    fn end_array<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"]")
    }

    fn begin_array_value<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.item(out, first)
    }

    fn begin_object<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.begin(out, b"{")
    }

    fn end_object<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        self.end(out, b"}")
    }

    fn begin_object_key<W: Write + ?Sized>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        self.item(out, first)
    }

    fn begin_object_value<W: Write + ?Sized>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    #[test]
    fn containers_are_broken_into_lines_down_to_the_depth() {
        let value = json!({"a": [1, [2, 3]], "b": {}, "c": [{"d": []}]});
        for (depth, want) in [
            (0, r#"{"a": [1, [2, 3]], "b": {}, "c": [{"d": []}]}"#),
            (1, "{\n  \"a\": [1, [2, 3]],\n  \"b\": {},\n  \"c\": [{\"d\": []}]\n}"),
            (2, "{\n  \"a\": [\n    1,\n    [2, 3]\n  ],\n  \"b\": {},\n  \"c\": [\n    {\"d\": []}\n  ]\n}"),
        ] {
            let mut out = Vec::new();
            super::write(&mut out, &value, depth).expect("Vec");
            assert_eq!(String::from_utf8(out).expect("UTF-8"), want, "depth {depth}");
        }
    }
}
