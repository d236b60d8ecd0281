//! What a rank holds, as text.

use std::fmt::Write as _;
use weightrefit_core::id::Rank;
use weightrefit_core::model::TensorTable;
use weightrefit_core::region::RankRegions;

/// The same text that `testdata/layout/regenerate.py` writes from the reference evaluator.
pub(crate) fn listing(table: &TensorTable, rank: Rank, regions: &RankRegions) -> String {
    let mut out = format!("rank {rank}\n");
    for local in &regions.locals {
        let shape: Vec<_> = local.shape.iter().map(u64::to_string).collect();
        writeln!(out, "local {} [{}]", local.name, shape.join(",")).unwrap();
    }
    for piece in &regions.pieces {
        let lead = piece.lead.map_or(String::new(), |lead| format!("[{lead}]"));
        let local = &regions.locals[piece.local.0 as usize].name;
        let dims: Vec<String> = piece
            .dims
            .iter()
            .map(|runs| {
                let runs: Vec<_> =
                    runs.iter().map(|run| format!("{}:{}+{}", run.local, run.hf, run.len)).collect();
                runs.join(" ")
            })
            .collect();
        let line = format!("piece {} > {local}{lead} {}", table[piece.tensor].name, dims.join(" x "));
        writeln!(out, "{}", line.trim_end()).unwrap();
    }
    out
}
