"""Compiled crates shared by checkouts: each runs its own code, and an unchanged one compiles nothing."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

FRESH = pathlib.Path(__file__).parent / "fresh.py"
MANIFEST = '[package]\nname = "weightrefit-tiny"\nversion = "0.1.0"\nedition = "2024"\n\n[workspace]\n'


class Shared(unittest.TestCase):
    """One folder of compiled crates, several checkouts of a program that prints one word."""

    def setUp(self):
        self.folder = pathlib.Path(self.enterContext(tempfile.TemporaryDirectory()))
        self.target = self.folder / "target"

    def checkout(self, name, word):
        """A clone whose program prints `word`."""
        root = self.folder / name
        shutil.rmtree(root, ignore_errors=True)
        (root / "tests").mkdir(parents=True)
        (root / "src").mkdir()
        shutil.copy(FRESH, root / "tests")
        (root / "Cargo.toml").write_text(MANIFEST)
        self.edit(root, word)
        subprocess.run(["git", "init", "-q", root], check=True)
        return root

    def edit(self, root, word):
        (root / "src/main.rs").write_text(f'fn main() {{ println!("{word}") }}\n')

    def cargo(self, root, keep=True):
        """(what the program prints, how many crates were compiled for that); `keep`: with the note kept in step."""
        command = ["cargo", "run", "--release", "--offline"]
        if keep:
            command = [sys.executable, "tests/fresh.py", *command]
        env = dict(os.environ, CARGO_TARGET_DIR=str(self.target), CARGO_TERM_COLOR="never")
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout.split(), done.stderr.count("Compiling")

    def test_a_new_clone_of_what_was_compiled_compiles_nothing(self):
        for _ in range(2):
            root = self.checkout("clone", "one")
            seen = self.cargo(root)
        self.assertEqual(seen, (["one"], 0))

    def test_a_new_clone_compiles_what_differs(self):
        self.cargo(self.checkout("clone", "one"))
        self.assertEqual(self.cargo(self.checkout("clone", "two")), (["two"], 1))

    def test_a_checkout_older_than_the_crates_of_another_runs_its_own_code(self):
        first, second = self.checkout("first", "one"), self.checkout("second", "two")
        seen = [self.cargo(root)[0] for root in (second, first, second)]
        self.assertEqual(seen, [["two"], ["one"], ["two"]])

    def test_a_file_with_an_old_time_and_other_content_is_compiled(self):
        root = self.checkout("clone", "one")
        written = os.stat(root / "src/main.rs").st_mtime_ns
        self.cargo(root)
        compiled = max(file.stat().st_mtime_ns for file in self.target.glob("release/.fingerprint/*/dep-*"))
        for time in compiled - 1, written:
            word = f"of-{time}"
            self.edit(root, word)
            os.utime(root / "src/main.rs", ns=(time, time))
            self.assertEqual(self.cargo(root), ([word], 1))

    def test_what_was_compiled_without_a_note_is_not_taken_for_a_clones(self):
        self.cargo(self.checkout("clone", "one"))
        self.cargo(self.checkout("clone", "two"), keep=False)
        self.assertEqual(self.cargo(self.checkout("clone", "one")), (["one"], 1))

    def test_what_cargo_alone_compiled_for_another_checkout_is_not_run(self):
        first, second = self.checkout("first", "one"), self.checkout("second", "two")
        self.cargo(first)
        os.utime(second / "src/main.rs")
        self.assertEqual(self.cargo(second, keep=False), (["two"], 1))
        self.assertEqual(self.cargo(first), (["one"], 1))

    def test_a_run_that_is_killed_vouches_for_nothing(self):
        first, second = self.checkout("first", "one"), self.checkout("second", "two")
        self.cargo(first)
        killed = [sys.executable, "tests/fresh.py", "bash", "-c", "cargo build -q --release --offline; kill -9 $PPID"]
        done = subprocess.run(killed, cwd=second, env=dict(os.environ, CARGO_TARGET_DIR=str(self.target)))
        self.assertEqual(done.returncode, -9)
        self.assertEqual(self.cargo(first), (["one"], 1))

    def test_another_checkout_finds_no_program_to_run_by_mistake(self):
        self.cargo(self.checkout("first", "one"))
        second = self.checkout("second", "two")
        command = [sys.executable, "tests/fresh.py", "test", "-e", self.target / "release/weightrefit-tiny"]
        done = subprocess.run(command, cwd=second, env=dict(os.environ, CARGO_TARGET_DIR=str(self.target)))
        self.assertEqual(done.returncode, 1)

    def test_without_git_all_is_compiled(self):
        root = self.checkout("clone", "one")
        shutil.rmtree(root / ".git")
        self.assertEqual([self.cargo(root)[1], self.cargo(root)[1]], [1, 1])


if __name__ == "__main__":
    unittest.main()
