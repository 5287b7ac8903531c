//! `plan`, and what the commands that load a model make of it.

mod common;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use common::{smollm2, stderr};
use place::profile::{Profile, example};
use serde_json::Value;
use tempfile::TempDir;

const LLAMA: &str = "llama-3.1-8b.Q4_K_M.gguf";
const QWEN: &str = "qwen2.5-14b-instruct-1m.Q8_0.gguf";

fn headers() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../place/tests/data/headers")
}

fn header(name: &str) -> String {
    let path = headers().join(name);
    path.into_os_string()
        .into_string()
        .expect("a path in UTF-8")
}

/// A run of the program on a machine that was never measured, with some variables set.
fn spillgate_with(args: &[&str], variables: &[(&str, &str)]) -> Output {
    let cache = TempDir::new().expect("a folder");
    Command::new(env!("CARGO_BIN_EXE_spillgate"))
        .args(args)
        .env("SPILLGATE_CACHE", cache.path())
        .envs(variables.iter().copied())
        .output()
        .expect("the program was built")
}

fn plan(model: &str, args: &[&str]) -> Output {
    let model = header(model);
    spillgate_with(&[&["plan", &model], args].concat(), &[])
}

fn stdout(output: &Output) -> String {
    let text = stderr(output);
    assert!(output.status.success(), "{}: {text}", output.status);
    String::from_utf8(output.stdout.clone()).expect("stdout is UTF-8")
}

fn json(output: &Output) -> Value {
    let text = stdout(output);
    serde_json::from_str(&text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

fn plan_json(model: &str, args: &[&str]) -> Value {
    json(&plan(model, &[args, &["--json"]].concat()))
}

/// What a run that was refused says, having written no result.
fn refusal(output: &Output) -> String {
    let text = stderr(output);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{output:?}");
    assert!(!text.contains("panicked"), "{text}");
    assert!(output.stdout.is_empty(), "{output:?}");
    text
}

#[test]
fn every_size_is_exact_through_the_program() {
    let table = fs::read_to_string(headers().join("expected.tsv")).expect("the table is there");
    let mut lines = table.lines().filter(|line| !line.starts_with('#'));
    let names: Vec<&str> = lines.next().expect("a head").split('\t').collect();
    let mut rows = 0;
    for line in lines {
        let cells: Vec<&str> = line.split('\t').collect();
        let cell = |name: &str| {
            let at = names.iter().position(|n| *n == name);
            cells[at.unwrap_or_else(|| panic!("no column {name}"))]
        };
        let found = plan_json(
            cell("file"),
            &[
                "--ctx",
                cell("n_ctx"),
                "--seqs",
                cell("n_seq"),
                "--cache-type-k",
                cell("type_k"),
                "--cache-type-v",
                cell("type_v"),
                "--ubatch",
                cell("n_ubatch"),
            ],
        );
        for (key, column) in [
            ("kv_bytes", "kv_bytes_total"),
            ("recurrent_bytes", "recurrent_bytes"),
            ("weight_bytes", "weight_bytes_total"),
            ("expert_bytes", "expert_bytes_total"),
            ("active_bytes_per_token", "active_bytes_per_token"),
        ] {
            assert_eq!(found[key].to_string(), cell(column), "{key}: {line}");
        }
        rows += 1;
    }
    assert!(rows > 20, "{rows} rows");
}

#[test]
fn a_plan_as_json_has_what_programs_read() {
    let args = ["--ctx", "65536", "--profile", "24gb-pcie4-ddr5"];
    let plan = plan_json(QWEN, &args);
    for key in [
        "weight_bytes",
        "expert_bytes",
        "active_bytes_per_token",
        "kv_bytes",
        "kv_alloc_bytes",
        "recurrent_bytes",
        "work_bytes",
        "t_star_bytes",
        "max_ctx",
    ] {
        assert!(plan[key].is_u64(), "{key}: {plan}");
    }
    let tiers = plan["tiers"].as_array().expect("tiers");
    let names: Vec<String> = tiers
        .iter()
        .map(|t| format!("{}/{}", t["type_k"], t["type_v"]).replace('"', ""))
        .collect();
    assert_eq!(names, ["f16/f16", "q8_0/q8_0", "q8_0/q4_0", "q4_0/q4_0"]);
    for tier in tiers {
        assert!(tier["kv_bytes"].is_u64() && tier["spill_bytes"].is_u64());
        assert!(tier["tok_s"].as_f64().is_some_and(|x| x > 0.0), "{tier}");
    }
    assert_eq!(tiers[0]["kv_bytes"], 12_884_901_888_u64);
    let choice = plan["choice"].as_str().expect("a choice").to_owned();
    assert!(names.contains(&choice), "{choice}");
    assert!(plan["reason"].as_str().is_some_and(|r| r.contains(&choice)));
    assert_eq!(plan["fits"], true);
    assert_eq!(plan["profile_source"], "example");
    // It ends where the weights would begin, and is planned all the same.
    assert_eq!(
        (&plan["runs"], plan["architecture"].as_str()),
        (&Value::Bool(false), Some("qwen2"))
    );
    // The parts of each memory add up, to the byte.
    for memory in ["fast", "host"] {
        let parts = plan["layout"][memory].as_array().expect("parts").iter();
        let sum: u64 = parts.map(|p| p["bytes"].as_u64().expect("bytes")).sum();
        assert_eq!(plan["layout"][format!("{memory}_bytes")], sum, "{memory}");
    }
}

#[test]
fn architectures_that_do_not_run_are_planned_and_marked() {
    for (model, is_known) in [
        ("deepseek-r1.no-mla.Q4_K_M.gguf", false),
        ("deepseek-r1.mla.Q4_K_M.gguf", false),
        ("gpt-oss-20b.MXFP4.gguf", true),
        ("mixtral-8x7b.Q4_0.gguf", true),
        ("olmoe-1b-7b.Q8_0.gguf", true),
        ("qwen3-30b-a3b.Q4_K_M.gguf", true),
    ] {
        let plan = plan_json(model, &["--profile", "h200-pcie5"]);
        let unsupported = plan["unsupported"].to_string();
        // These files are headers alone.
        assert_eq!(plan["runs"], false);
        assert_eq!(
            unsupported.contains("architecture"),
            !is_known,
            "{unsupported}"
        );
        assert!(!unsupported.contains("expert"), "{unsupported}");
        assert!(plan["expert_bytes"].as_u64() > Some(0));
    }
    let text = stdout(&plan("olmoe-1b-7b.Q8_0.gguf", &[]));
    assert!(text.contains("does not run here: "), "{text}");
    let plan = plan_json(LLAMA, &["--cache-type-k", "q5_1", "--cache-type-v", "q5_1"]);
    assert!(plan["unsupported"].to_string().contains("cache type q5_1"));
}

#[test]
fn the_text_says_what_goes_where_and_why() {
    let args = ["--ctx", "65536", "--profile", "8gb-pcie4x8-ddr4"];
    let text = stdout(&plan(LLAMA, &args));
    for part in [
        "the link binds at",
        "q8_0/q4_0",
        "T*",
        "tok/s at full context",
        "choice: ",
        "KV of layers that see everything",
        "fits up to",
        "(4912898304 bytes)",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("not measured"), "{text}");
}

#[test]
fn a_plan_is_printed_also_where_nothing_fits_and_says_what_would() {
    let args = ["--ctx", "1010000", "--profile", "8gb-pcie3-ddr4"];
    let nothing = plan_json(QWEN, &args);
    assert_eq!(nothing["fits"], false);
    let reason = nothing["reason"].as_str().expect("a reason");
    assert!(
        reason.contains("needs") && reason.contains("GiB"),
        "{reason}"
    );
    let hints = nothing["hints"].to_string();
    assert!(hints.contains("with --ctx "), "{hints}");
    let text = stdout(&plan(QWEN, &args));
    assert!(text.contains("hint: with --ctx "), "{text}");
    // No room at all, not even for a chunk's cells.
    let output = plan(LLAMA, &["--ctx", "4096", "--device-mem", "1", "--json"]);
    let tiny = json(&output);
    assert_eq!(
        (output.status.code(), &tiny["fits"]),
        (Some(0), &Value::Bool(false))
    );
    assert_eq!(tiny["max_ctx"], 0);
    assert_eq!(
        tiny["kv_bytes"].as_u64(),
        tiny["tiers"][3]["kv_bytes"].as_u64()
    );
}

#[test]
fn a_machine_that_was_not_measured_is_labelled() {
    let plan_ = plan_json(LLAMA, &[]);
    assert_eq!(plan_["profile_source"], "default, not measured");
    assert!(plan_["notes"].to_string().contains("spillgate probe"));
    let text = stdout(&plan(LLAMA, &[]));
    assert!(text.contains("default, not measured"), "{text}");
    assert!(
        text.contains("note: this machine was not measured"),
        "{text}"
    );
}

#[test]
fn a_machine_may_be_written_by_hand() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("mine.json");
    let file = path.to_str().expect("a path in UTF-8");
    let mut mine = example("12gb-pcie4-ddr4").expect("it ships");
    mine.name = "mine".to_owned();
    mine.source = place::profile::Source::HandWritten;
    fs::write(&path, mine.to_json()).expect("it can be written");
    let args = |profile: &'static str| ["--ctx", "32768", "--profile", profile];
    let by_name = plan_json(QWEN, &args("12gb-pcie4-ddr4"));
    let by_file = plan_json(QWEN, &["--ctx", "32768", "--profile", file]);
    assert_eq!(by_file["profile"], "mine");
    assert_eq!(by_file["profile_source"], "hand-written");
    assert_eq!(by_file["tiers"], by_name["tiers"]);

    // Each change, and what the message names.
    type Change = fn(&mut Value);
    let bad: [(Change, &str); 8] = [
        (
            |p| p["host"]["read_gb_s"]["all"] = 0.into(),
            "host.read_gb_s.all",
        ),
        (
            |p| p["device"]["link"]["to_device_pinned"][0]["gb_s"] = (-1).into(),
            "gb_s",
        ),
        (
            |p| p["host"]["memory_total_bytes"] = 0.into(),
            "memory_total_bytes",
        ),
        (|p| p["device"]["free_bytes"] = "much".into(), "much"),
        (|p| p["version"] = 99.into(), "version 99"),
        (|p| p["surprise"] = 1.into(), "surprise"),
        (|p| p["host"]["fork_join_us"] = Value::Null, "line"),
        (
            |p| drop(p["host"].as_object_mut().expect("an object").remove("isa")),
            "isa",
        ),
    ];
    for (change, names) in bad {
        let mut value: Value = serde_json::from_str(&mine.to_json()).expect("it is JSON");
        change(&mut value);
        fs::write(&path, value.to_string()).expect("it can be written");
        let text = refusal(&plan(QWEN, &["--profile", file]));
        assert!(
            text.contains(names) && text.contains("mine.json"),
            "{names}: {text}"
        );
    }
    for garbage in ["", "{", "[]", "\u{0}", &" ".repeat(2 << 20)] {
        fs::write(&path, garbage).expect("it can be written");
        refusal(&plan(QWEN, &["--profile", file]));
    }
    fs::write(&path, [0xff, 0xfe]).expect("it can be written");
    refusal(&plan(QWEN, &["--profile", file]));
    let folder = folder.path().to_str().expect("a path in UTF-8");
    refusal(&plan(QWEN, &["--profile", folder]));
    let text = refusal(&plan(QWEN, &["--profile", "no-such"]));
    assert!(
        text.contains("16gb-pcie5-ddr5") && text.contains("hint: "),
        "{text}"
    );
}

#[test]
fn figures_are_replaced_by_flags_and_variables() {
    let model = header(QWEN);
    let base = ["plan", &model, "--profile", "24gb-pcie4-ddr5", "--json"];
    let link = |set: &[&str], variables: &[(&str, &str)]| {
        let output = spillgate_with(&[&base[..], set].concat(), variables);
        json(&output)["rates"]["link_gb_s"]
            .as_f64()
            .expect("a rate")
    };
    let own = link(&[], &[]);
    assert!(own > 10.0, "{own}");
    assert_eq!(link(&["--set", "link_gb_s=6.7"], &[]), 6.7);
    let variable = [("SPILLGATE_LINK_GB_S", "5.5")];
    assert_eq!(link(&[], &variable), 5.5);
    assert_eq!(
        link(&["--set", "link_gb_s=6.7"], &variable),
        6.7,
        "flags win"
    );
    assert_eq!(link(&[], &[("SPILLGATE_LINK_GB_S", "")]), own);
    // Every single figure has a path, too: the host's reads bind once they are slower than the link.
    let binds = |set: &str| {
        let output = spillgate_with(&[&base[..], &["--set", set]].concat(), &[]);
        json(&output)["rates"]["bw_eff_gb_s"].as_f64()
    };
    assert_eq!(binds("host.read_gb_s.all=2.5"), Some(2.5));

    for (set, names) in [
        ("link_gb_s", "NAME=VALUE"),
        ("link_gb_s=fast", "fast"),
        ("link_gb_s=NaN", "link"),
        ("link_gb_s=0", "link"),
        ("link_gb_s=1e308", "link"),
        ("no_such=1", "no_such"),
        ("device_free_mib=1e300", "device_free_mib"),
    ] {
        let text = refusal(&spillgate_with(&[&base[..], &["--set", set]].concat(), &[]));
        assert!(text.contains(names), "{set}: {text}");
    }
    let text = refusal(&spillgate_with(&base, &[("SPILLGATE_LINK_GB_S", "fast")]));
    assert!(
        text.contains("SPILLGATE_LINK_GB_S") && text.contains("fast"),
        "{text}"
    );
}

#[test]
fn a_drawing_is_there_whole() {
    let folder = TempDir::new().expect("a folder");
    let path = folder.path().join("plan.svg");
    let file = path.to_str().expect("a path in UTF-8");
    fs::write(&path, "an older one").expect("it can be written");
    let args = [
        "--ctx",
        "65536",
        "--profile",
        "16gb-pcie4-ddr5",
        "--plot",
        file,
    ];
    stdout(&plan(QWEN, &args));
    let svg = fs::read_to_string(&path).expect("it was written");
    assert!(
        svg.starts_with("<svg ") && svg.ends_with("</svg>\n"),
        "{svg}"
    );
    assert_eq!(svg.matches("<polyline").count(), 4, "a line for each tier");
    for (open, close) in [("<svg", "</svg>"), ("<text", "</text>")] {
        assert_eq!(svg.matches(open).count(), svg.matches(close).count());
    }
    assert_eq!(
        fs::read_dir(folder.path()).expect("a folder").count(),
        1,
        "no part is left"
    );
    // What cannot be written is an error, and no result.
    for bad in [
        folder.path().to_path_buf(),
        folder.path().join("no/such/folder.svg"),
    ] {
        let bad = bad.to_str().expect("a path in UTF-8");
        let text = refusal(&plan(QWEN, &["--plot", bad]));
        assert!(text.contains("cannot write"), "{text}");
    }
}

#[test]
fn absurd_flags_are_errors() {
    for args in [
        &["--ctx", "0"][..],
        &["--ctx", "18446744073709551615"],
        &["--ctx", "99999999999999999999"],
        &["--ctx", "-1"],
        &["--ctx", "NaN"],
        &["--seqs", "0"],
        &[
            "--seqs",
            "18446744073709551615",
            "--ctx",
            "18446744073709551615",
        ],
        &["--ubatch", "0"],
        &["--ubatch", "18446744073709551615"],
        &["--device-mem", "0"],
        &["--device-mem", "x"],
        &["--vram-target", "-5"],
        &["--spill", "some"],
        &["--spill-drop", "NaN"],
        &["--spill-drop", "-0.1"],
        &["--spill-drop", "1.5"],
        &["--spill-model", "guess"],
        &["--prefer", "luck"],
        &["--min-tier", "q9"],
        &["--cache-type-k", "q3_9"],
        &["--threads", "0"],
        &["--threads", "18446744073709551615"],
        &["--isa", "none"],
    ] {
        refusal(&plan(LLAMA, args));
    }
    // Large, but numbers: a plan that does not fit, or one without bounds.
    for args in [
        &["--ctx", "1000000000000"][..],
        &["--device-mem", "18446744073709551615"],
        &["--vram-target", "18446744073709551615"],
        &[
            "--spill",
            "18446744073709551615",
            "--profile",
            "8gb-pcie3-ddr4",
        ],
        &["--spill-max-mib", "18446744073709551615"],
        &["--seqs", "1000000"],
        &["--threads", "1024"],
    ] {
        assert!(plan_json(LLAMA, args)["tiers"].is_array(), "{args:?}");
    }
    let text = refusal(&spillgate_with(&["plan"], &[]));
    assert!(text.contains("hint: "), "{text}");
    refusal(&spillgate_with(&["plan", "/no/such/file.gguf"], &[]));
}

#[test]
fn more_context_than_a_model_was_trained_with_is_warned_of() {
    let args = ["--ctx", "200000", "--profile", "h200-pcie5"];
    let text = stdout(&plan(LLAMA, &args));
    assert!(
        text.contains("warning: the model was trained with 131072"),
        "{text}"
    );
    let output = plan(LLAMA, &[&args[..], &["--json"]].concat());
    assert!(stderr(&output).contains("131072"));
    let output = plan(LLAMA, &["--ctx", "131072", "--json"]);
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[test]
fn what_can_be_chosen_and_set_is_listed() {
    let list = json(&spillgate_with(
        &["plan", "--profile", "list", "--json"],
        &[],
    ));
    let profiles = list["profiles"].as_array().expect("profiles");
    assert!(profiles.iter().any(|p| p["name"] == "h200-pcie5"), "{list}");
    let terms = list["terms"].as_array().expect("terms");
    assert!(
        terms.iter().any(|t| t["variable"] == "SPILLGATE_T_SYNC_US"),
        "{list}"
    );
    let text = stdout(&spillgate_with(&["plan", "--profile", "list"], &[]));
    assert!(
        text.contains("8gb-pcie3-ddr4") && text.contains("t_sync_us"),
        "{text}"
    );
}

/// What the demo model needs: 92.1 MiB of weights, 180 MiB of f16 KV at 8192 cells, 20.2 MiB of work space.
fn run_within(mib: &str, args: &[&str], test: &str) -> Option<Output> {
    let model = smollm2(test)?;
    let model = model.to_str().expect("a path in UTF-8");
    let always = ["run", model, "--raw", "Hello", "-n", "1", "--json"];
    let variables = [("SPILLGATE_MEMORY_AVAILABLE_MIB", mib)];
    Some(spillgate_with(&[&always, args].concat(), &variables))
}

#[test]
fn what_does_not_fit_is_refused_with_what_would() {
    let test = "what_does_not_fit_is_refused_with_what_would";
    let pinned = [
        "--ctx",
        "8192",
        "--cache-type-k",
        "f16",
        "--cache-type-v",
        "f16",
    ];
    let Some(refused) = run_within("250", &pinned, test) else {
        return;
    };
    assert_eq!(refused.status.code(), Some(1));
    let text = refusal(&refused);
    for part in [
        "error: needs 293 MiB with f16/f16, 250 available: with --ctx 6144 it fits",
        "with q8_0/q8_0 it fits at 8192",
        "hint: 'spillgate plan ",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let model = smollm2(test).expect("it was there");
    let model = model.to_str().expect("a path in UTF-8");
    // Host memory is no room for what may not be spilled.
    let small = ["run", model, "hi", "--device-mem", "160", "--spill", "off"];
    let text = refusal(&spillgate_with(&[&small[..], &pinned].concat(), &[]));
    assert!(
        text.contains("needs 293 MiB with f16/f16, 160 available on the device, "),
        "{text}"
    );
    // Beyond any memory, without a variable.
    let bench = ["bench", model, "-d", "4000000000", "-p", "0", "-n", "1"];
    let text = refusal(&spillgate_with(&bench, &[]));
    assert!(
        text.contains("needs ") && text.contains(" GiB with f16/f16"),
        "{text}"
    );
    let text = refusal(&spillgate_with(
        &["chat", model, "--ctx", "4000000000"],
        &[],
    ));
    assert!(text.contains("with q4_0/q4_0"), "{text}");
}

#[test]
fn a_default_context_is_what_fits_and_one_asked_for_is_kept() {
    let test = "a_default_context_is_what_fits_and_one_asked_for_is_kept";
    let Some(cut) = run_within("250", &[], test) else {
        return;
    };
    let answer = json(&cut);
    let text = stderr(&cut);
    assert!(text.contains("instead of 8192"), "{text}");
    let kv = answer["memory"]["real"]["kv_bytes"]
        .as_u64()
        .expect("bytes");
    assert!(kv < 180 << 20 && kv > 100 << 20, "{answer}");
    let kept = run_within("250", &["--ctx", "8192"], test).expect("it was there");
    let answer = json(&kept);
    assert_eq!(
        answer["memory"]["real"]["kv_bytes"],
        30 * 8192 * 2 * 3 * 68_u64
    );
    assert!(stderr(&kept).contains("q8_0/q8_0"), "{}", stderr(&kept));
}

#[test]
fn planned_and_real_bytes_are_told() {
    let test = "planned_and_real_bytes_are_told";
    let Some(output) = run_within("4096", &["--ctx", "1000"], test) else {
        return;
    };
    let memory = &json(&output)["memory"];
    let (planned, real) = (&memory["planned"], &memory["real"]);
    assert_eq!(planned["kv_bytes"], real["kv_bytes"]);
    assert_eq!(planned["work_bytes"], real["work_bytes"]);
    let (planned, real) = (&planned["weight_bytes"], &real["weight_bytes"]);
    assert_eq!(planned.as_u64(), Some(96_576_768));
    let padding = real.as_u64().expect("bytes") - 96_576_768;
    assert!(padding < 64 * 272, "{padding}");
    let text = stderr(&output);
    assert!(
        text.starts_with("memory: weights 92.1 MiB (planned 92.1 MiB), KV "),
        "{text}"
    );
    assert_eq!(
        text.lines().count(),
        1,
        "nothing was decided, nothing more is said: {text}"
    );
}

#[test]
fn examples_are_profiles_that_files_may_hold() {
    // What a user gets to start from.
    let profile = example("32gb-pcie5-ddr5").expect("it ships");
    assert_eq!(
        Profile::from_json(&profile.to_json()).expect("it is one"),
        profile
    );
}
