//! Rows, their table and their JSON.

use std::io::Write;
use std::path::PathBuf;

/// One measured rate; more is better, except for seconds.
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) value: f64,
    pub(crate) unit: &'static str,
    /// What it is measured against, in the same unit and run.
    pub(crate) peer: Option<(&'static str, f64)>,
    /// The value that passes.
    pub(crate) bar: Option<f64>,
}

impl Row {
    fn passes(&self) -> Option<bool> {
        let seconds = self.unit == "s";
        self.bar.map(|bar| if seconds { self.value <= bar } else { self.value >= bar })
    }
}

/// The middle value.
pub(crate) fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints the table and writes `target/bench/NAME.json`; an error where a row does not pass.
pub(crate) fn write(name: &str, rows: &[Row]) -> anyhow::Result<()> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{:<44} {:>8} {:<16} {:>8} {:>6} {:>8}  peer",
        "row", "value", "unit", "peer", "ratio", "bar"
    )?;
    for row in rows {
        let number = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.2}"));
        let peer = row.peer.map(|(_, value)| value);
        let mark = row.passes().map_or("", |passes| if passes { "" } else { "  BELOW BAR" });
        writeln!(
            out,
            "{:<44} {:>8.2} {:<16} {:>8} {:>6} {:>8}  {}{mark}",
            row.name,
            row.value,
            row.unit,
            number(peer),
            number(peer.map(|peer| row.value / peer)),
            number(row.bar),
            row.peer.map_or("", |(name, _)| name),
        )?;
    }
    let rounded = |value: f64| (value * 1000.0).round() / 1000.0;
    let json: Vec<serde_json::Value> = rows
        .iter()
        .map(|row| {
            serde_json::json!({
                "name": row.name,
                "value": rounded(row.value),
                "unit": row.unit,
                "peer": row.peer.map(|(_, value)| rounded(value)),
                "bar": row.bar.map(rounded),
                "pass": row.passes(),
            })
        })
        .collect();
    // Beside the build outputs of this checkout, wherever cargo puts its own.
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../target/bench");
    std::fs::create_dir_all(&folder)?;
    let path = folder.join(format!("{name}.json"));
    std::fs::write(&path, serde_json::to_string_pretty(&json)? + "\n")?;
    writeln!(out, "written to target/bench/{name}.json")?;
    Ok(())
}
