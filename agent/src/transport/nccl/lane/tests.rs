//! Scripts for the first rank: what happens, and what it orders.

use super::*;

const GPU: [&str; 3] = ["GPU-a", "GPU-b", "GPU-c"];

fn facts(gpu: &str, nccl: u32) -> Result<Facts, Reason> {
    Ok(Facts { nccl, gpu: gpu.into(), shares_gpu: false, chunk_bytes_max: 1 << 20 })
}

/// One line: orders as short words.
fn shown(orders: &[Order]) -> String {
    let word = |order: &Order| match order {
        Order::Tell(rank, FromRoot::Tcp(reason)) => format!("{rank}:tcp({})", reason.code),
        Order::Tell(rank, FromRoot::Undecided) => format!("{rank}:undecided"),
        Order::Tell(rank, FromRoot::Form { attempt, .. }) => format!("{rank}:form{attempt}"),
        Order::Tell(rank, FromRoot::Ready { attempt }) => format!("{rank}:ready{attempt}"),
        Order::Tell(rank, FromRoot::Abort { attempt, reason: None }) => format!("{rank}:abort{attempt}"),
        Order::Tell(rank, FromRoot::Abort { attempt, reason: Some(reason) }) => {
            format!("{rank}:abort{attempt}({})", reason.code)
        }
        Order::TakeTurn => "take".into(),
        Order::GiveTurn => "give".into(),
        Order::Mint => "mint".into(),
    };
    orders.iter().map(word).collect::<Vec<_>>().join(" ")
}

/// Runs a script on a lane of three ranks: `h0` hello of rank 0, `n0` hello without NCCL, `o0` with an older NCCL,
/// `s0` on the GPU of rank 1, `turn`, `id`, `noid`, `f0@1` formed, `x0@1` failed, `c0@1` was told to
/// stop, `g0` gone.
fn run(script: &str) -> String {
    let mut root = Root::new(3);
    let mut out = Vec::new();
    for word in script.split(' ') {
        let (rank, attempt) = word[1..].split_once('@').unwrap_or((&word[1..], "0"));
        let rank = rank.parse::<u32>().unwrap_or(0);
        let attempt = attempt.parse().unwrap_or(0);
        let reason = Reason::new(Code::NcclError, "it failed");
        let gpu = GPU[rank as usize];
        let orders = match word {
            "turn" => root.turn(),
            "id" => root.minted(Ok(UniqueId([1; 128]))),
            "noid" => root.minted(Err(reason)),
            _ => match &word[..1] {
                "h" => root.hello(rank, facts(gpu, 23203)),
                "o" => root.hello(rank, facts(gpu, 22809)),
                "s" => root.hello(rank, facts(GPU[1], 23203)),
                "n" => root.hello(rank, Err(Reason::new(Code::GpuNotVisible, "no GPU"))),
                "f" => root.formed(rank, attempt),
                "x" => root.failed(attempt, reason),
                "c" => root.failed(attempt, Reason::new(Code::Cancelled, "it was stopped")),
                "g" => root.gone(rank),
                _ => panic!("{word}"),
            },
        };
        if !orders.is_empty() {
            out.push(shown(&orders));
        }
    }
    out.join(" | ")
}

#[test]
fn the_first_rank_decides_as_written() {
    let form = "take | mint | 0:form1 1:form1 2:form1";
    let rows = [
        (
            "the usual way",
            "h0 h2 h1 turn id f0@1 f1@1 f2@1",
            format!("{form} | give 0:ready1 1:ready1 2:ready1"),
        ),
        (
            "one has no GPU",
            "h0 n1 h2",
            "0:tcp(GpuNotVisible) 1:tcp(GpuNotVisible) 2:tcp(GpuNotVisible)".into(),
        ),
        ("one is older", "h0 o1 h2", "0:tcp(VersionSkew) 1:tcp(VersionSkew) 2:tcp(VersionSkew)".into()),
        (
            "two on one GPU",
            "h0 h1 s2",
            "0:tcp(TransportUnavailable) 1:tcp(TransportUnavailable) 2:tcp(TransportUnavailable)".into(),
        ),
        (
            "one goes before the turn, and the turn comes late",
            "h0 h1 h2 g1 turn",
            "take | give | give".into(),
        ),
        (
            "no id",
            "h0 h1 h2 turn noid",
            "take | mint | give 0:tcp(NcclError) 1:tcp(NcclError) 2:tcp(NcclError)".into(),
        ),
        ("one dies while it forms", "h0 h1 h2 turn id f0@1 g1", format!("{form} | give 0:abort1 2:abort1")),
        (
            "one fails later, and all come again",
            "h0 h1 h2 turn id f0@1 f1@1 f2@1 x1@1 h0 h1 h2 turn id f0@2 f1@2 f2@2",
            format!(
                "{form} | give 0:ready1 1:ready1 2:ready1 | 0:abort1(NcclError) 1:abort1(NcclError) \
                 2:abort1(NcclError) | take | mint | 0:form2 1:form2 2:form2 | give 0:ready2 1:ready2 2:ready2"
            ),
        ),
        (
            "one is told to stop, which is not why the others end",
            "h0 h1 h2 turn id f0@1 f1@1 f2@1 c1@1",
            format!("{form} | give 0:ready1 1:ready1 2:ready1 | 0:abort1 1:abort1 2:abort1"),
        ),
        ("what an older attempt says changes nothing", "h0 h1 h2 turn id f0@0 x1@0 f1@7", form.into()),
        (
            "a rank that begins anew ends the attempt of the others",
            "h0 h1 h2 turn id f0@1 f1@1 f2@1 h2",
            format!("{form} | give 0:ready1 1:ready1 2:ready1 | 0:abort1 1:abort1"),
        ),
        (
            "attempts that fail one after the other are not repeated for ever",
            "h0 h1 h2 turn id x0@1 h0 h1 h2 turn id x0@2 h0 h1 h2 turn id x0@3 h0 h1 h2",
            format!(
                "{form} | give 0:abort1(NcclError) 1:abort1(NcclError) 2:abort1(NcclError) | take | mint | 0:form2 \
                 1:form2 2:form2 | give 0:abort2(NcclError) 1:abort2(NcclError) 2:abort2(NcclError) | take | mint | \
                 0:form3 1:form3 2:form3 | give 0:abort3(NcclError) 1:abort3(NcclError) 2:abort3(NcclError) | \
                 0:tcp(NcclError) 1:tcp(NcclError) 2:tcp(NcclError)"
            ),
        ),
        (
            "a lane of TCP is looked at again when a rank begins anew",
            "h0 n1 h2 h1",
            "0:tcp(GpuNotVisible) 1:tcp(GpuNotVisible) 2:tcp(GpuNotVisible) | 0:undecided 1:undecided 2:undecided \
             take"
                .into(),
        ),
    ];
    for (name, script, want) in rows {
        assert_eq!(run(script), want, "{name}");
    }
}

#[test]
fn an_id_survives_its_way_and_is_not_shown() {
    let id = UniqueId(std::array::from_fn(|at| at as u8));
    let hex = LaneId::from(id);
    assert_eq!(id_of(&hex), Some(id));
    assert!(!format!("{:?}", FromRoot::Form { attempt: 1, id: hex, chunk_bytes: 1 }).contains("0001"));
    assert_eq!(id_of(&LaneId("zz".into())), None);
    assert_eq!(id_of(&LaneId("00".into())), None);
}
