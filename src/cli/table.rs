//! Plain tables and figures for people.

/// Where a column's text stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Align {
    Left,
    Right,
}

/// Rows of text under headings.
#[derive(Debug)]
pub(crate) struct Table<const N: usize> {
    align: [Align; N],
    rows: Vec<[String; N]>,
}

impl<const N: usize> Table<N> {
    pub(crate) fn new(columns: &[(&str, Align); N]) -> Self {
        let align = columns.map(|(_, align)| align);
        Self { align, rows: vec![columns.map(|(name, _)| name.to_owned())] }
    }

    pub(crate) fn row(&mut self, cells: [String; N]) {
        self.rows.push(cells);
    }

    /// Lines without trailing space and without a last line end.
    pub(crate) fn shown(&self) -> String {
        let width =
            |column: usize| self.rows.iter().map(|row| row[column].chars().count()).max().unwrap_or_default();
        let widths: [usize; N] = std::array::from_fn(width);
        let line = |row: &[String; N]| {
            let cell = |column: usize| {
                let (text, width) = (&row[column], widths[column]);
                match self.align[column] {
                    Align::Left => format!("{text:<width$}"),
                    Align::Right => format!("{text:>width$}"),
                }
            };
            (0..N).map(cell).collect::<Vec<_>>().join("  ").trim_end().to_owned()
        };
        self.rows.iter().map(line).collect::<Vec<_>>().join("\n")
    }
}

/// `22.6 MB`: decimal units and one decimal, rounded to nearest; `-` for nothing.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 6] = ["kB", "MB", "GB", "TB", "PB", "EB"];
    if count == 0 {
        return "-".into();
    }
    if count < 1000 {
        return format!("{count} B");
    }
    let mut tenths = u128::from(count) * 10;
    let mut unit = 0;
    tenths = (tenths + 500) / 1000;
    while tenths >= 10_000 && unit + 1 < UNITS.len() {
        tenths = (tenths + 500) / 1000;
        unit += 1;
    }
    format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
}

/// `92,292,096`.
pub(crate) fn grouped(count: u64) -> String {
    let digits = count.to_string();
    let mut text = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::{bytes, grouped};

    #[test]
    fn bytes_are_decimal_with_one_decimal() {
        for (count, want) in [
            (0, "-"),
            (999, "999 B"),
            (1000, "1.0 kB"),
            (999_949, "999.9 kB"),
            (999_950, "1.0 MB"),
            (22_565_376, "22.6 MB"),
            (u64::MAX, "18.4 EB"),
        ] {
            assert_eq!(bytes(count), want, "{count}");
        }
    }

    #[test]
    fn long_numbers_are_grouped_by_three() {
        for (count, want) in [(0, "0"), (999, "999"), (1000, "1,000"), (92_292_096, "92,292,096")] {
            assert_eq!(grouped(count), want);
        }
    }
}
