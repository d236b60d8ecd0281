//! The double is as strict as it says: each case is a process of its own, since a fault ends it and a failure stays.

#![expect(unsafe_code, reason = "touches memory that must not be touched")]

use std::os::fd::AsFd;
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Command, ExitStatus, Stdio};
use weightrefit_agent::cuda::{
    Context, CudaError, DeviceMemory, Driver, Event, ImportError, PinnedMemory, Stream,
};

const CASE: &str = "FAKEGPU_CASE";

/// Cargo puts the library beside the tests of its package.
fn library() -> PathBuf {
    std::env::current_exe().expect("a path").with_file_name("libweightrefit_fakegpu.so")
}

fn context() -> Context {
    let driver = Driver::open(Some(&library())).expect("the double");
    let device = driver.devices().expect("devices").remove(0);
    Context::new(&driver, device).expect("a context")
}

fn wait(stream: &Stream) -> Result<(), CudaError> {
    while !stream.is_done()? {
        std::thread::yield_now();
    }
    Ok(())
}

/// Runs a case with knobs.
fn run(case: &str, knobs: &[(&str, &str)]) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().expect("a path"));
    command.args(["--exact", "the_case_that_is_asked_for", "--quiet"]).env(CASE, case);
    // Its own count of tests is not this program's.
    command.envs(knobs.iter().copied()).stdout(Stdio::null()).status().expect("runs")
}

#[test]
fn the_case_that_is_asked_for() {
    let Ok(case) = std::env::var(CASE) else { return };
    let context = context();
    let stream = Stream::new(&context).expect("a stream");
    let memory = DeviceMemory::new(&context, 4096);
    match case.as_str() {
        "touch" => {
            let address = memory.expect("memory").address(0, 1).expect("inside") as *const u8;
            // SAFETY: there is none; this is what must end the process.
            std::hint::black_box(unsafe { address.read_volatile() });
        }
        "early" => {
            let memory = memory.expect("memory");
            let mut host = PinnedMemory::new(&context, 4096).expect("memory");
            stream.clear(&memory).expect("enqueued");
            stream.download(&memory, 0, &mut host, 4096).expect("enqueued");
            assert!(host.bytes().iter().all(|byte| *byte == 0xa5), "garbage before the copy");
            wait(&stream).expect("done");
            assert!(host.bytes().iter().all(|byte| *byte == 0), "zeros after it");
        }
        "late" => {
            let memory = memory.expect("memory");
            let mut host = PinnedMemory::new(&context, 4096).expect("memory");
            host.bytes_mut().fill(1);
            stream.upload(&host, &memory, 0, 4096).expect("enqueued");
            host.bytes_mut().fill(2); // too early: the copy has not read
            wait(&stream).expect("done");
            stream.download(&memory, 0, &mut host, 4096).expect("enqueued");
            wait(&stream).expect("done");
            assert!(host.bytes().iter().all(|byte| *byte == 2), "the copy read what was written too early");
        }
        "freed" => {
            let memory = memory.expect("memory");
            stream.clear(&memory).expect("enqueued");
            drop(memory);
            let error = wait(&stream).expect_err("memory that is gone");
            assert!(matches!(error, CudaError::Call { code: 700, .. }), "{error}");
            let later = DeviceMemory::new(&context, 1).expect_err("the context has failed for good");
            assert!(matches!(later, CudaError::Call { code: 700, .. }), "{later}");
        }
        "order" => {
            let memory = memory.expect("memory");
            let (other, event) =
                (Stream::new(&context).expect("a stream"), Event::new(&context).expect("an event"));
            let mut host = PinnedMemory::new(&context, 4096).expect("memory");
            host.bytes_mut().fill(7);
            assert!(event.is_done().expect("no failure"), "never recorded");
            stream.upload(&host, &memory, 0, 4096).expect("enqueued");
            event.record(&stream).expect("recorded");
            assert!(!event.is_done().expect("no failure"));
            other.wait(&event).expect("enqueued");
            let mut back = PinnedMemory::new(&context, 4096).expect("memory");
            other.download(&memory, 0, &mut back, 4096).expect("enqueued");
            wait(&other).expect("done");
            assert!(back.bytes().iter().all(|byte| *byte == 7), "after the other stream");
        }
        "shared" => {
            let memory = DeviceMemory::shareable(&context, 100).expect("memory");
            let fd = memory.export().expect("made for it");
            // A page of 2 MiB is more than 100 bytes, and less than this.
            let reader = |case: &str| {
                let mut command = Command::new(std::env::current_exe().expect("a path"));
                command.args(["--exact", "the_case_that_is_asked_for", "--quiet"]).env(CASE, case);
                command.stdin(fd.try_clone().expect("a descriptor")).stdout(Stdio::null());
                assert!(command.status().expect("runs").success(), "{case}");
            };
            let mut host = PinnedMemory::new(&context, 100).expect("memory");
            host.bytes_mut().fill(9);
            stream.upload(&host, &memory, 0, 100).expect("enqueued");
            wait(&stream).expect("done");
            assert_eq!(context.free_bytes(), Ok((8 << 30) - (2 << 20) - 4096));
            drop(memory); // freed under those who have its descriptor
            assert_eq!(context.free_bytes(), Ok((8 << 30) - 4096), "of this process");
            reader("import");
            reader("overwrite");
        }
        "import" => {
            let fd = std::io::stdin();
            let memory = DeviceMemory::import(&context, fd.as_fd(), "m", 100).expect("device memory");
            let mut host = PinnedMemory::new(&context, 100).expect("memory");
            stream.download(&memory, 0, &mut host, 100).expect("enqueued");
            wait(&stream).expect("done");
            assert!(host.bytes().iter().all(|byte| *byte == 9), "as its owner left it");
            let short = DeviceMemory::import(&context, fd.as_fd(), "m", (2 << 20) + 1).expect_err("less");
            assert_eq!(short, ImportError::TooShort { name: "m".into(), claimed: (2 << 20) + 1 });
            let absurd = DeviceMemory::import(&context, fd.as_fd(), "m", u64::MAX).expect_err("less");
            assert_eq!(absurd, ImportError::TooShort { name: "m".into(), claimed: u64::MAX });
            let driver = Driver::open(Some(&library())).expect("the double");
            let second = driver.devices().expect("devices").remove(1);
            let second = Context::new(&driver, second).expect("a context");
            let elsewhere = DeviceMemory::import(&second, fd.as_fd(), "m", 100).expect_err("another device");
            assert!(
                matches!(elsewhere, ImportError::OtherDevice { actual: 0, expected: 1, .. }),
                "{elsewhere}"
            );
            let file = std::fs::File::open("/proc/self/exe").expect("a file");
            let stranger = DeviceMemory::import(&context, file.as_fd(), "m", 100).expect_err("a file");
            assert!(matches!(stranger, ImportError::NotShared { .. }), "{stranger}");
        }
        "overwrite" => {
            let fd = std::io::stdin();
            let memory = DeviceMemory::import(&context, fd.as_fd(), "m", 100).expect("device memory");
            stream.clear(&memory).expect("enqueued");
            let error = wait(&stream).expect_err("mapped to read");
            assert!(matches!(error, CudaError::Call { code: 700, .. }), "{error}");
        }
        "exhausted" => {
            let error = DeviceMemory::new(&context, 1 << 20).expect_err("too much");
            assert_eq!(error, CudaError::OutOfMemory { bytes: 1 << 20 });
            drop(memory);
            assert_eq!(context.free_bytes(), Ok(1 << 16));
        }
        other => panic!("{other}"),
    }
}

#[test]
fn what_real_devices_punish_rarely_is_punished_each_time() {
    let slow = [("FAKEGPU_LATENCY_US", "100000")];
    assert_eq!(run("touch", &[]).signal(), Some(11), "the host touches device memory");
    let rows: [(&str, &[(&str, &str)]); 6] = [
        ("shared", &[("FAKEGPU_SEED", "7")]),
        ("early", &slow),
        ("late", &slow),
        ("freed", &slow),
        ("order", &slow),
        ("exhausted", &[("FAKEGPU_DEVICE_BYTES", "65536")]),
    ];
    for (case, knobs) in rows {
        assert!(run(case, knobs).success(), "{case}");
    }
}
