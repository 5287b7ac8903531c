//! `probe`, what plans make of what it found, and which device is used.

#[path = "../../engine/tests/common/damaged/mod.rs"]
mod damaged;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use damaged::Sketch;
use serde_json::Value;
use tempfile::TempDir;

/// A folder with a made-up model, and what is cached.
struct Place {
    folder: TempDir,
    model: String,
}

fn text(path: PathBuf) -> String {
    path.into_os_string()
        .into_string()
        .expect("a path in UTF-8")
}

impl Place {
    fn new() -> Self {
        let folder = TempDir::new().expect("a folder");
        let path = folder.path().join("model.gguf");
        Sketch::sound().write(&path);
        Self {
            model: text(path),
            folder,
        }
    }

    fn run(&self, args: &[&str], variables: &[(&str, &str)]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_spillgate"))
            .args(args)
            .env("SPILLGATE_CACHE", self.folder.path().join("cache"))
            .envs(variables.iter().copied())
            .output()
            .expect("the program was built")
    }

    fn json(&self, args: &[&str]) -> Value {
        let output = self.run(&[args, &["--json"]].concat(), &[]);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let said = stderr(&output);
        assert!(output.status.success(), "{said}");
        serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}; {said}"))
    }

    fn cached(&self) -> Vec<PathBuf> {
        let files = fs::read_dir(self.folder.path().join("cache/probe"));
        let files = files.into_iter().flatten();
        files.map(|f| f.expect("an entry").path()).collect()
    }
}

fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn what_was_measured_is_cached_and_planned_with() {
    let place = Place::new();
    let probe = ["probe", &place.model, "--device", "cpu", "--ubatch", "16"];
    let plan = [
        "plan",
        &place.model,
        "--device",
        "cpu",
        "--ubatch",
        "16",
        "--ctx",
        "2000",
    ];
    let before = place.json(&plan);
    assert_eq!(before["profile_source"], "default, not measured");
    assert_eq!(place.cached().len(), 0, "a plan measures nothing");

    let measured = place.json(&probe);
    assert_eq!(measured["source"], "measured");
    assert_eq!(
        (&measured["key"]["device"], &measured["device"]),
        (&"".into(), &Value::Null)
    );
    let products = measured["host"]["products"].as_array().expect("products");
    assert!(!products.is_empty());
    assert!(measured["host"]["read_gb_s"]["all"]["value"].as_f64() > Some(0.0));
    assert_eq!(place.cached().len(), 1);

    // From the cache it comes at once, and says the same.
    let again = place.json(&probe);
    for part in ["products", "attention", "read_gb_s", "copy_gb_s"] {
        assert_eq!(again["host"][part], measured["host"][part], "{part}");
    }
    let table = place.run(&probe, &[]);
    let table = String::from_utf8_lossy(&table.stdout).into_owned();
    for part in ["MEMORY, GB/S", "WEIGHTS", "ATTENTION, K/V", "fork and join"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    let planned = place.json(&plan);
    assert_eq!(planned["profile_source"], "measured");
    assert_eq!(planned["kv_alloc_bytes"], before["kv_alloc_bytes"]);
    assert_ne!(
        planned["predicted"], before["predicted"],
        "rates are this machine's"
    );
    // What was measured for another ubatch is for that one alone.
    let other = [&plan[..4], &["--ubatch", "17"]].concat();
    assert_eq!(
        place.json(&other)["profile_source"],
        "default, not measured"
    );

    // What is to be doubted is said, in both.
    let cached = &place.cached()[0];
    let text = fs::read_to_string(cached).expect("a text");
    let mut profile: Value = serde_json::from_str(&text).expect("JSON");
    profile["disturbed"] = vec!["host.read_gb_s.all"].into();
    profile["guessed"] = vec!["host.fork_join_us"].into();
    fs::write(cached, profile.to_string()).expect("it can be written");
    for args in [&plan[..], &probe] {
        let said = place.run(args, &[]).stdout;
        let said = String::from_utf8_lossy(&said).into_owned();
        for part in [
            "1 of ",
            "while other processes used the processor (host.read_gb_s.all)",
            "a built-in profile's (host.fork_join_us)",
        ] {
            assert!(said.contains(part), "{part}: {said}");
        }
    }

    // A damaged cache is told of, and counts as none.
    fs::write(&place.cached()[0], "{\"version\":").expect("it can be written");
    let output = place.run(&[&plan[..], &["--json"]].concat(), &[]);
    assert!(
        stderr(&output).contains("cannot be used"),
        "{}",
        stderr(&output)
    );
    let planned: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(planned["profile_source"], "default, not measured");
}

#[test]
fn split_files_are_planned_and_measured_as_whole_ones() {
    let place = Place::new();
    let stem = place.folder.path().join("split");
    let bytes = fs::metadata(&place.model).expect("it is there").len();
    let parts = Sketch::sound().writer().write_split(&stem, bytes / 3);
    let parts = parts.expect("it can be split");
    assert!(parts.len() > 1, "{parts:?}");
    let first = text(parts[0].clone());
    let plan = |model: &str| {
        // What is free changes from one run to the next.
        let memory = "memory_available_mib=1000";
        let args = [
            "plan", model, "--device", "cpu", "--ubatch", "16", "--ctx", "2000", "--set", memory,
        ];
        place.json(&args)
    };
    let (whole, split) = (plan(&place.model), plan(&first));
    for key in [
        "weight_bytes",
        "active_bytes_per_token",
        "kv_alloc_bytes",
        "work_bytes",
        "tiers",
        "choice",
        "predicted",
    ] {
        assert_eq!(split[key], whole[key], "{key}");
    }
    assert_eq!(split["runs"], true);
    let memory = place.run(
        &[
            "run", &first, "--device", "cpu", "--raw", "a", "-n", "1", "--ctx", "2000", "--ubatch",
            "16", "--json",
        ],
        &[],
    );
    let said = stderr(&memory);
    assert!(memory.status.success(), "{said}");
    assert!(said.contains("memory: weights"), "{said}");
}

/// What `--device` says, on a machine whose driver cannot be loaded.
#[cfg(target_os = "linux")]
#[test]
fn a_broken_driver_is_told_of_once_and_the_cpu_computes() {
    let place = Place::new();
    let broken = place.folder.path().join("libcuda.so.1");
    fs::write(&broken, "no library").expect("it can be written");
    let libraries = place.folder.path().to_str().expect("a path in UTF-8");
    let variables = [("LD_LIBRARY_PATH", libraries)];
    let run = |device: &[&str]| {
        let args = [
            "run",
            &place.model,
            "--raw",
            "a",
            "-n",
            "1",
            "--ctx",
            "300",
            "--json",
        ];
        place.run(&[&args[..], device].concat(), &variables)
    };
    let auto = run(&[]);
    let said = stderr(&auto);
    assert!(auto.status.success(), "{said}");
    let told: Vec<&str> = said.lines().filter(|l| l.contains("GPU")).collect();
    assert_eq!(told.len(), 1, "{said}");
    assert!(
        told[0].contains("cannot be used") && told[0].contains("libcuda.so.1"),
        "{said}"
    );
    let answer: Value = serde_json::from_slice(&auto.stdout).expect("JSON");
    assert_eq!(answer["tokens"].as_array().map(Vec::len), Some(1));

    let cpu = run(&["--device", "cpu"]);
    assert!(
        cpu.status.success() && !stderr(&cpu).contains("GPU"),
        "{}",
        stderr(&cpu)
    );
    assert_eq!(cpu.stdout.is_empty(), auto.stdout.is_empty());

    for command in ["run", "plan", "probe", "bench"] {
        let mut args = vec![command, &place.model, "--device", "cuda"];
        if command == "run" {
            args.push("a");
        }
        let refused = place.run(&args, &variables);
        let said = stderr(&refused);
        assert_eq!(refused.status.code(), Some(1), "{command}: {said}");
        assert!(
            said.contains("--device cuda:0: no CUDA driver"),
            "{command}: {said}"
        );
        assert!(
            said.contains("hint: ") && refused.stdout.is_empty(),
            "{command}: {said}"
        );
        assert!(!said.contains("panicked"), "{command}: {said}");
    }
}

/// A machine without a GPU is an ordinary one: nothing is said of it.
#[test]
fn without_a_driver_nothing_is_said() {
    if Path::new("/proc/driver/nvidia/version").exists() {
        eprintln!("skipped: without_a_driver_nothing_is_said: this machine has a driver");
        return;
    }
    let place = Place::new();
    let args = ["plan", &place.model, "--ctx", "300", "--json"];
    let output = place.run(&args, &[]);
    assert_eq!(stderr(&output), "");
    let plan: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!(plan["memory"]["place"], "host");
    let refused = place.run(&["plan", &place.model, "--device", "cuda:7"], &[]);
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        stderr(&refused).contains("--device cuda:7"),
        "{}",
        stderr(&refused)
    );
}

#[test]
fn a_profile_is_used_without_its_device_where_the_cpu_is_to_compute() {
    let place = Place::new();
    let plan = |device: &str, profile: &str| {
        let args = [
            "plan",
            &place.model,
            "--device",
            device,
            "--profile",
            profile,
            "--json",
        ];
        place.run(&args, &[])
    };
    let found = |output: &Output| -> Value {
        let plan: Value = serde_json::from_slice(&output.stdout).expect("JSON");
        plan["memory"]["place"].clone()
    };
    assert_eq!(found(&plan("auto", "h200-pcie5")), "device");
    assert_eq!(found(&plan("cuda", "h200-pcie5")), "device");
    assert_eq!(found(&plan("cpu", "h200-pcie5")), "host");
    let refused = plan("cuda", "cpu-16-cores");
    assert_eq!(refused.status.code(), Some(1));
    assert!(
        stderr(&refused).contains("cpu-16-cores has no device"),
        "{}",
        stderr(&refused)
    );
}
