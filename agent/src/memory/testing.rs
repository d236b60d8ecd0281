//! What is mapped, what is refused, and what an access outside does.

use super::*;
use rustix::fs::{MemfdFlags, SealFlags};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use weightrefit_core::code::Code;
use weightrefit_core::dtype::Cast;

fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
    let flags = MemfdFlags::ALLOW_SEALING | MemfdFlags::CLOEXEC;
    let fd = rustix::fs::memfd_create("test", flags).expect("memfd");
    rustix::fs::ftruncate(&fd, len).expect("resized");
    rustix::fs::fcntl_add_seals(&fd, seals).expect("sealed");
    fd
}

#[test]
fn only_sealed_memfds_of_their_claimed_size_are_mapped() {
    let both = SealFlags::SHRINK | SealFlags::GROW;
    let file = OwnedFd::from(tempfile::tempfile().expect("file"));
    let shm = OwnedFd::from(tempfile::tempfile_in("/dev/shm").expect("file"));
    let (socket, _other) = UnixStream::pair().expect("pair");
    let unsealable = rustix::fs::memfd_create("test", MemfdFlags::CLOEXEC).expect("memfd");
    let rows: [(&str, OwnedFd, u64, Option<&str>); 11] = [
        ("sealed", memfd(8192, both), 8192, None),
        ("longer than claimed", memfd(8192, both), 100, None),
        ("nothing claimed", memfd(0, both), 0, None),
        ("one byte short", memfd(8192, both), 8193, Some("memory `m` has 8192 bytes, its owner claims 8193")),
        ("absurd claim", memfd(8192, both), u64::MAX, Some("its owner claims 18446744073709551615")),
        (
            "unsealed",
            memfd(8192, SealFlags::empty()),
            8192,
            Some("lacks the seals SHRINK and GROW (it has 0x0)"),
        ),
        (
            "may shrink",
            memfd(8192, SealFlags::GROW),
            8192,
            Some("lacks the seals SHRINK and GROW (it has 0x4)"),
        ),
        ("cannot be sealed", unsealable, 0, Some("lacks the seals SHRINK and GROW (it has 0x1)")),
        ("a file", file, 0, Some("memory `m` is not a memfd with ordinary pages")),
        ("a file in shared memory", shm, 0, Some("lacks the seals")),
        ("a socket", socket.into(), 0, Some("memory `m` is not a memfd with ordinary pages")),
    ];
    for (name, fd, claimed, refusal) in rows {
        match (Mapping::adopt(fd.as_fd(), "m", claimed), refusal) {
            (Ok(mapping), None) => {
                assert_eq!((mapping.len(), mapping.is_writable()), (claimed, false), "{name}");
            }
            (Err(error), Some(refusal)) => {
                assert!(error.to_string().contains(refusal), "{name}: {error}");
                assert_eq!(error.code(), Code::RegistrationMismatch, "{name}");
            }
            (result, _) => panic!("{name}: {result:?}"),
        }
    }
}

#[test]
fn what_one_process_writes_another_mapping_shows() {
    let (fd, ours) = create("staging", 5000).expect("memory");
    let theirs = Mapping::adopt(fd.as_fd(), "staging", 5000).expect("sealed");
    ours.write(4090, b"over a page");
    let mut out = [0; 11];
    theirs.read(4090, &mut out);
    assert_eq!(&out, b"over a page");
    let mut rest = [1; 8];
    theirs.read(0, &mut rest);
    assert_eq!(rest, [0; 8], "new memory is zero");
}

#[test]
fn staging_refuses_writers_that_come_later() {
    let (fd, ours) = create("staging", 4096).expect("memory");
    refuse_new_writers(fd.as_fd(), "staging").expect("sealed");
    assert!(rustix::io::pwrite(&fd, &[1], 0).is_err(), "nobody writes through the fd");
    assert!(rustix::fs::ftruncate(&fd, 0).is_err(), "nobody cuts it");
    ours.write(0, &[7]);
    let mut out = [0];
    Mapping::adopt(fd.as_fd(), "staging", 4096).expect("may be read").read(0, &mut out);
    assert_eq!(out, [7]);
}

#[test]
fn rows_and_casts_read_and_write_where_they_should() {
    let (_fd, memory) = create("rows", 100).expect("memory");
    memory.write(0, &(0..100).collect::<Vec<u8>>());
    for run in [1, 2, 3, 4] {
        let mut out = vec![0; run * 5];
        memory.read_rows(2, 11, run, &mut out);
        let expected: Vec<u8> =
            (0..5).flat_map(|row| (0..run as u8).map(move |at| 2 + 11 * row + at)).collect();
        assert_eq!(out, expected, "runs of {run}");
        let marks: Vec<u8> = expected.iter().map(|byte| byte | 0x80).collect();
        memory.write_rows(2, 11, run, &marks);
        memory.read_rows(2, 11, run, &mut out);
        assert_eq!(out, marks, "runs of {run}");
        memory.write_rows(2, 11, run, &expected);
    }
    let (_fd, memory) = create("casts", 64).expect("memory");
    let numbers: Vec<u8> = [1.0_f32, -2.5, f32::NAN].iter().flat_map(|x| x.to_le_bytes()).collect();
    memory.write(3, &numbers);
    let mut out = [0; 6];
    memory.read_cast(3, Cast::F32ToBf16, &mut out);
    assert_eq!(out, [0x80, 0x3f, 0x20, 0xc0, 0xc0, 0x7f]);
}

/// M5: a bug here ends its task; it never reads or writes beside the mapping.
#[test]
fn an_access_outside_panics() {
    let (fd, memory) = create("small", 100).expect("memory");
    let read_only = Mapping::adopt(fd.as_fd(), "small", 100).expect("sealed");
    let rows: [(&str, &(dyn Fn() + std::panic::RefUnwindSafe)); 10] = [
        ("end", &|| memory.read(99, &mut [0; 2])),
        ("far", &|| memory.read(u64::MAX, &mut [0; 1])),
        ("write at the end", &|| memory.write(100, &[1])),
        ("write to read-only memory", &|| read_only.write(0, &[1])),
        ("rows to read-only memory", &|| read_only.write_rows(0, 2, 1, &[1])),
        ("last row", &|| memory.read_rows(0, 50, 2, &mut [0; 6])),
        ("stride wraps", &|| memory.read_rows(0, u64::MAX, 2, &mut [0; 6])),
        ("half a run", &|| memory.read_rows(0, 2, 2, &mut [0; 3])),
        ("cast at the end", &|| memory.read_cast(98, Cast::F32ToBf16, &mut [0; 2])),
        ("receive into read-only memory", &|| ReceiveBatch::new().push_mapped(&read_only, 0, 1)),
    ];
    for (name, access) in rows {
        assert!(std::panic::catch_unwind(access).is_err(), "{name}");
    }
    memory.read(100, &mut []);
    memory.read_rows(99, 7, 1, &mut [0]);
}

#[test]
fn a_batch_moves_its_slices_in_order_however_the_socket_cuts_them() {
    let (_from_fd, from) = create("from", 1 << 20).expect("memory");
    let (_to_fd, to) = create("to", 1 << 20).expect("memory");
    from.write(0, &(0..1_u32 << 18).flat_map(u32::to_le_bytes).collect::<Vec<u8>>());
    let (a, b) = UnixStream::pair().expect("pair");
    let sender = std::thread::spawn(move || {
        let mut batch = SendBatch::new();
        batch.push_mapped(&from, 5, 300_000);
        batch.push_private(b"between");
        batch.push_mapped(&from, 700_000, 200_000);
        while batch.bytes() > 0 {
            batch.send(a.as_fd()).expect("the other end reads");
        }
        from
    });
    let mut batch = ReceiveBatch::new();
    batch.push_mapped(&to, 0, 300_000);
    batch.push_mapped(&to, 400_000, 7);
    batch.push_mapped(&to, 500_000, 200_000);
    while batch.bytes() > 0 {
        assert!(batch.receive(b.as_fd()).expect("the other end writes") > 0);
    }
    let from = sender.join().expect("sender");
    let bytes = |memory: &Mapping, at, len| {
        let mut out = vec![0; len];
        memory.read(at, &mut out);
        out
    };
    assert!(bytes(&to, 0, 300_000) == bytes(&from, 5, 300_000));
    assert_eq!(bytes(&to, 400_000, 7), b"between");
    assert!(bytes(&to, 500_000, 200_000) == bytes(&from, 700_000, 200_000));
}
