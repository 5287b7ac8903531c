//! What every command promises: data on stdout, the rest on stderr, exit codes, JSON.

mod common;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use common::{smollm2, spillgate, spillgate_with_stdin, stderr};
use serde_json::Value;

/// What a successful run wrote to stdout.
fn stdout(output: &Output) -> String {
    assert!(
        output.status.success(),
        "{}: {}",
        output.status,
        stderr(output)
    );
    String::from_utf8(output.stdout.clone()).expect("stdout is UTF-8")
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"))
}

fn path(path: &Path) -> &str {
    path.to_str().expect("the cache folder's name is UTF-8")
}

#[test]
fn an_error_says_what_to_do_and_is_no_success() {
    let output = spillgate(&["run", "no-such-model", "hello"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(output.stdout.is_empty());
    let text = stderr(&output);
    assert!(
        text.starts_with("error: ") && text.contains("smollm2") && text.contains("\nhint: "),
        "{text}"
    );
    assert!(
        !text.contains('\x1b'),
        "no colour where there is no terminal: {text}"
    );
    assert_eq!(spillgate(&["run", "--no-such-flag"]).status.code(), Some(2));
    assert_eq!(
        spillgate(&["chat", "smollm2", "--json"]).status.code(),
        Some(1)
    );
}

#[test]
fn what_cannot_end_well_is_refused_before_it_begins() {
    let Some(model) = smollm2("what_cannot_end_well_is_refused_before_it_begins") else {
        return;
    };
    let model = path(&model);
    let folder = tempfile::tempdir().unwrap();
    let ids = folder.path().join("ids");
    std::fs::write(&ids, "\n\n").unwrap();
    let session = folder.path().join("none/session");
    for (args, part) in [
        (&["run", model, "hi", "-t", "100000"][..], "1 to 1024"),
        (
            &["run", model, "hi", "--pool-workers", "100000"],
            "1 to 1024",
        ),
        (
            &["run", model, "hi", "--session", path(&session)],
            "no folder",
        ),
        (&["run", model], "stdin is empty"),
        (&["run", model, "-f", path(&ids)], "is empty"),
        (
            &["eval", "logits", model, "--hash", "--tokens", path(&ids)],
            "no token ids",
        ),
        (&["info", path(folder.path())], "is a folder"),
    ] {
        let output = spillgate(args);
        let text = stderr(&output);
        assert_eq!(output.status.code(), Some(1), "{args:?}: {text}");
        assert!(
            output.stdout.is_empty() && text.contains(part),
            "{args:?}: {text}"
        );
        assert!(text.contains("\nhint: "), "{args:?}: {text}");
    }
    let many = ["bench", model, "-p", "1", "-n", "0", "-r", "100000000000"];
    assert_eq!(spillgate(&many).status.code(), Some(2));
}

#[test]
fn help_has_examples_for_every_command() {
    for command in [
        "pull",
        "run",
        "chat",
        "serve",
        "info",
        "plan",
        "probe",
        "bench",
        "tokenize",
        "ps",
        "completions",
        "man",
    ] {
        let text = stdout(&spillgate(&[command, "--help"]));
        assert!(
            text.contains("Example") && text.contains(&format!("spillgate {command} ")),
            "{text}"
        );
    }
    for command in ["logits", "ppl", "kld", "niah", "tiers"] {
        let text = stdout(&spillgate(&["eval", command, "--help"]));
        assert!(
            text.contains(&format!("spillgate eval {command} ")),
            "{text}"
        );
    }
}

#[test]
fn the_list_of_models_is_there_for_people_and_programs() {
    assert!(stdout(&spillgate(&["pull"])).contains("smollm2"));
    let list = json(&stdout(&spillgate(&["pull", "--json"])));
    assert!(
        list[0]["bytes"].as_u64().unwrap() > 0 && list[0]["licence"].is_string(),
        "{list}"
    );
}

#[test]
fn tokens_come_from_the_argument_and_from_stdin_byte_for_byte() {
    let Some(model) = smollm2("tokens_come_from_the_argument_and_from_stdin_byte_for_byte") else {
        return;
    };
    let model = path(&model);
    assert_eq!(
        stdout(&spillgate(&["tokenize", model, "Hello world"])),
        "19556 905\n"
    );
    let output = spillgate_with_stdin(&["tokenize", model, "--json"], b"Hello world");
    assert_eq!(stdout(&output), "{\"ids\":[19556,905]}\n");
    // A line end and bytes that are no text are tokens too.
    let output = spillgate_with_stdin(&["tokenize", model], b"Hello world\n\xff");
    assert!(stdout(&output).starts_with("19556 905 "), "{output:?}");
    let special = "<|im_start|>";
    assert_eq!(stdout(&spillgate(&["tokenize", model, special])), "1\n");
    let parts = stdout(&spillgate(&[
        "tokenize",
        model,
        special,
        "--special",
        "off",
    ]));
    assert!(parts.split_whitespace().count() > 1, "{parts}");
    assert_eq!(
        stdout(&spillgate(&["tokenize", model, "Hello", "--bos", "on"])),
        "1 19556\n"
    );
}

#[test]
fn info_describes_the_file() {
    let Some(model) = smollm2("info_describes_the_file") else {
        return;
    };
    let info = json(&stdout(&spillgate(&[
        "info",
        path(&model),
        "--json",
        "--tensors",
        "--metadata",
    ])));
    assert_eq!(info["architecture"], "llama");
    assert_eq!(info["file_bytes"], 98_362_432);
    assert_eq!(info["shape"]["layers"], 30);
    assert_eq!(info["tokenizer"]["tokens"], 49152);
    assert_eq!(info["unsupported"], Value::Array(Vec::new()));
    assert_eq!(info["tensors"].as_array().unwrap().len(), 272);
    assert_eq!(info["metadata"]["general.architecture"], "llama");
}

#[test]
fn a_reader_that_has_enough_is_no_error() {
    let Some(model) = smollm2("a_reader_that_has_enough_is_no_error") else {
        return;
    };
    // Megabytes of vocabulary, into a pipe that nobody reads.
    let mut child = Command::new(env!("CARGO_BIN_EXE_spillgate"))
        .args(["info", path(&model), "--json", "--metadata"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert!(
        output.status.success() && output.stderr.is_empty(),
        "{output:?}"
    );
}

#[test]
fn an_answer_streams_to_stdout_and_its_figures_to_stderr() {
    let Some(model) = smollm2("an_answer_streams_to_stdout_and_its_figures_to_stderr") else {
        return;
    };
    let args = [
        "run",
        path(&model),
        "--raw",
        "The capital of France is",
        "-n",
        "8",
        "--temp",
        "0",
    ];
    let output = spillgate(&args);
    let text = stdout(&output);
    let figures = stderr(&output);
    for part in [
        "prompt 5 tok",
        "decode 8 tok",
        "tok/s",
        "first token",
        "peak memory",
    ] {
        assert!(figures.contains(part), "{part} is missing: {figures}");
    }
    let answer = json(&stdout(&spillgate(&[&args[..], &["--json"]].concat())));
    assert_eq!(
        format!("{}\n", answer["text"].as_str().unwrap()),
        text,
        "greedy text is always the same"
    );
    assert_eq!(
        (answer["finish"].as_str(), answer["prompt_tokens"].as_u64()),
        (Some("length"), Some(5))
    );
    assert_eq!(answer["tokens"].as_array().unwrap().len(), 8);
    // The model, its cells and some working space.
    let peak = answer["peak_bytes"].as_u64();
    assert!(
        !cfg!(target_os = "linux") || (50 << 20..400 << 20).contains(&peak.unwrap()),
        "{peak:?}"
    );
    // The prompt may come from a pipe just as well.
    let piped = spillgate_with_stdin(
        &["run", path(&model), "--raw", "-n", "8", "--temp", "0"],
        b"The capital of France is",
    );
    assert_eq!(stdout(&piped), text);
}

#[test]
fn a_seed_decides_the_text() {
    let Some(model) = smollm2("a_seed_decides_the_text") else {
        return;
    };
    let with_seed = |seed: &str| {
        let args = [
            "run",
            path(&model),
            "--raw",
            "Once upon a time",
            "-n",
            "24",
            "--temp",
            "1.5",
            "--seed",
            seed,
        ];
        stdout(&spillgate(&args))
    };
    assert_eq!(with_seed("7"), with_seed("7"));
    assert_ne!(with_seed("7"), with_seed("8"));
}

#[test]
fn a_stop_string_ends_an_answer_and_is_not_shown() {
    let Some(model) = smollm2("a_stop_string_ends_an_answer_and_is_not_shown") else {
        return;
    };
    let args = [
        "run",
        path(&model),
        "--raw",
        "1, 2, 3, 4,",
        "-n",
        "40",
        "--temp",
        "0",
        "--json",
    ];
    let free = json(&stdout(&spillgate(&args)));
    let free = free["text"].as_str().unwrap();
    let stop: String = free.chars().skip(3).take(2).collect();
    let stopped = json(&stdout(&spillgate(
        &[&args[..], &["--stop", &stop]].concat(),
    )));
    assert_eq!(stopped["finish"], "stop_string");
    assert_eq!(stopped["text"].as_str(), free.split(&stop).next());
}

#[test]
fn logits_are_the_same_bits_however_they_are_computed() {
    let Some(model) = smollm2("logits_are_the_same_bits_however_they_are_computed") else {
        return;
    };
    let dir = tempfile::TempDir::new().unwrap();
    let ids = dir.path().join("ids.txt");
    std::fs::write(&ids, "504 2365 6354 12 284 198 30\n28 29\n").unwrap();
    let hash = |flags: &[&str]| {
        let args = [
            "eval",
            "logits",
            path(&model),
            "--tokens",
            path(&ids),
            "--hash",
        ];
        stdout(&spillgate(&[&args[..], flags].concat()))
    };
    let expected = hash(&[]);
    assert!(
        expected.trim_end().len() == 64 && expected.ends_with('\n'),
        "{expected}"
    );
    for flags in [
        &["--by-token"][..],
        &["--isa", "scalar", "-t", "1"],
        &["--ubatch", "3"],
        &["--mmap", "off"],
    ] {
        assert_eq!(hash(flags), expected, "{flags:?}");
    }
    assert_ne!(
        hash(&["--cache-type-k", "q4_0"]),
        expected,
        "the flag has an effect"
    );
}

#[test]
fn a_run_is_no_distance_from_itself_and_some_from_another_setting() {
    let Some(model) = smollm2("a_run_is_no_distance_from_itself_and_some_from_another_setting")
    else {
        return;
    };
    let dir = tempfile::TempDir::new().unwrap();
    let (ids, stored) = (dir.path().join("ids.txt"), dir.path().join("logits.jsonl"));
    std::fs::write(&ids, "504 2365 6354 12 284 198 30\n28 29\n").unwrap();
    let lines = stdout(&spillgate(&[
        "eval",
        "logits",
        path(&model),
        "--tokens",
        path(&ids),
        "--top",
        "10",
    ]));
    assert_eq!(lines.lines().count(), 9);
    std::fs::write(&stored, lines).unwrap();
    let kld = |other: &str, flags: &[&str]| {
        let args = ["eval", "kld", other, "--reference", path(&stored), "--json"];
        json(&stdout(&spillgate(&[&args[..], flags].concat())))
    };
    for same in [kld(path(&model), &[]), kld(path(&stored), &[])] {
        assert!(
            same["kl_nats"]["max"].as_f64().unwrap().abs() < 1e-6,
            "{same}"
        );
        assert_eq!(
            (
                same["kl_nats"]["positions"].as_u64(),
                same["top1"]["share"].as_f64()
            ),
            (Some(9), Some(1.0))
        );
    }
    let other = kld(
        path(&model),
        &["--cache-type-k", "q4_0", "--cache-type-v", "q4_0"],
    );
    assert!(other["kl_nats"]["mean"].as_f64().unwrap() > 1e-5, "{other}");
}

#[test]
fn two_settings_are_as_far_apart_as_their_types_not_their_places() {
    let Some(model) = smollm2("two_settings_are_as_far_apart_as_their_types_not_their_places")
    else {
        return;
    };
    let dir = tempfile::TempDir::new().unwrap();
    let (text, ids) = (dir.path().join("text.txt"), dir.path().join("ids.txt"));
    let words: String = (0..160).map(|i| format!("{} ", i * i % 577)).collect();
    std::fs::write(&text, words).unwrap();
    std::fs::write(&ids, "504 2365 6354 12 284 198 30\n28\n").unwrap();
    let kld = |against: &str, more: &[&str]| {
        let args = ["eval", "kld", path(&model), "--json", "--against", against];
        json(&stdout(&spillgate(&[&args[..], more].concat())))
    };
    let of_text = |against: &str| kld(against, &["-f", path(&text)]);
    let of = |report: &Value, side: &str| report[side]["perplexity"].as_f64().unwrap();
    for (against, spills) in [("", false), ("--window 256 --kv-share 0", true)] {
        let same = of_text(against);
        assert_eq!(same["kl_nats"]["max"], 0.0, "{same}");
        assert_eq!(same["top1"]["share"], 1.0, "{same}");
        assert!(same["top1"]["positions"].as_u64().unwrap() > 200, "{same}");
        assert_eq!(of(&same, "base"), of(&same, "other"));
        assert_eq!(same["base"]["cells"]["host_bytes"], 0);
        let spilled = same["other"]["cells"]["host_bytes"].as_u64().unwrap();
        assert_eq!(spilled > 0, spills, "{same}");
    }
    let other = of_text("q8_0/q4_0");
    assert_eq!(other["base"]["cache_type_k"], "f16");
    assert_eq!(other["other"]["cache_type_k"], "q8_0");
    assert_eq!(other["other"]["cache_type_v"], "q4_0");
    let mean = other["kl_nats"]["mean"].as_f64().unwrap();
    assert!(mean > 1e-6 && mean < 1.0, "{other}");
    assert_ne!(of(&other, "base"), of(&other, "other"));
    // Ids are compared at every position, however they are fed.
    let chunks = kld("q4_0", &["--tokens", path(&ids)]);
    assert_eq!(chunks["kl_nats"]["positions"], 8);
    let by_token = kld("q4_0", &["--tokens", path(&ids), "--by-token"]);
    assert_eq!(by_token["kl_nats"], chunks["kl_nats"]);
    for (args, why) in [
        (&["--against", "q9_0", "-f", "x"][..], "expected K/V"),
        (&["--against", "--depth 3", "-f", "x"], "--depth"),
        (&["--against", "q8_0"], "--file"),
        (
            &["--against", "q8_0", "--reference", "x", "-f", "x"],
            "--reference",
        ),
        (&[], "--against"),
    ] {
        let output = spillgate(&[&["eval", "kld", path(&model)], args].concat());
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(
            stderr(&output).contains(why),
            "{args:?}: {}",
            stderr(&output)
        );
    }
}

const TIERS: [&str; 10] = [
    "--ctx",
    "640",
    "--window",
    "256",
    "--kv-share",
    "0",
    "--task",
    "niah_single_1",
    "--samples",
    "1",
];

#[test]
fn every_tier_is_a_row_and_a_spill_changes_no_bit() {
    let Some(model) = smollm2("every_tier_is_a_row_and_a_spill_changes_no_bit") else {
        return;
    };
    let args = ["eval", "tiers", path(&model), "--json"];
    let report = json(&stdout(&spillgate(&[&args[..], &TIERS].concat())));
    assert_eq!(report["complete"], true);
    assert_eq!(
        (&report["n_ctx"], &report["depth"]),
        (&Value::from(640), &Value::from(629))
    );
    let rows = report["rows"].as_array().unwrap();
    let names: Vec<&str> = rows
        .iter()
        .map(|r| r["setting"].as_str().unwrap())
        .collect();
    assert_eq!(
        names,
        [
            "f16 resident",
            "f16 spilled",
            "q8_0 resident",
            "auto",
            "q8_0/q4_0 resident",
            "q4_0 resident"
        ]
    );
    for row in rows {
        let positive = |x: &Value| x.as_f64().is_some_and(|x| x > 0.0);
        assert_eq!(row["left_out"], Value::Null, "{row}");
        assert!(
            positive(&row["speed"]["tok_s_p50"]) && positive(&row["tok_s_predicted"]),
            "{row}"
        );
        assert!(positive(&row["perplexity"]), "{row}");
        assert_eq!(row["speed"]["tok_s"].as_array().unwrap().len(), 9);
    }
    let (resident, spilled) = (&rows[0], &rows[1]);
    assert_eq!(
        (&resident["speed"]["drop"], &resident["drop_predicted"]),
        (&0.0.into(), &0.0.into())
    );
    assert_eq!(
        (&resident["compared"], &resident["spilled_bytes"]),
        (&Value::Null, &0.into())
    );
    // Two of three blocks, of 256 cells, 30 layers, K and V of 3 heads of 64.
    assert_eq!(spilled["spilled_bytes"], 2 * 256 * 30 * 2 * 3 * 64 * 2);
    assert!(
        spilled["drop_predicted"].as_f64().unwrap() > 0.0,
        "{spilled}"
    );
    assert_eq!(spilled["compared"]["kl_nats"]["max"], 0.0, "{spilled}");
    assert_eq!(spilled["compared"]["top1"]["share"], 1.0, "{spilled}");
    for key in ["needles_percent", "perplexity", "kv_bytes"] {
        assert_eq!(spilled[key], resident[key]);
    }
    assert_eq!(
        resident["needles_percent"], 100.0,
        "the model can do this: {resident}"
    );
    let kl = |row: &Value| row["compared"]["kl_nats"]["mean"].as_f64().unwrap();
    assert!(
        0.0 < kl(&rows[2]) && kl(&rows[2]) < kl(&rows[5]),
        "{report}"
    );
    let bytes = |row: &Value| row["kv_bytes"].as_u64().unwrap();
    assert!(
        bytes(&rows[5]) < bytes(&rows[4]) && bytes(&rows[4]) < bytes(&rows[2]),
        "{report}"
    );
}

#[cfg(unix)]
#[test]
fn an_interrupted_table_has_what_was_done() {
    let Some(model) = smollm2("an_interrupted_table_has_what_was_done") else {
        return;
    };
    let mut child = Command::new(env!("CARGO_BIN_EXE_spillgate"))
        .args(["eval", "tiers", path(&model)])
        .args(TIERS)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap() == "measuring needles"));
    let interrupt = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(interrupt.unwrap().success());
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{rest:?}");
    let table = String::from_utf8(output.stdout).unwrap();
    let row = |name: &str| {
        let row = table.lines().find(|line| line.starts_with(name));
        row.unwrap_or_else(|| panic!("{name}: {table}")).to_owned()
    };
    assert!(row("f16 spilled").contains(" 0.00e0 "), "{table}");
    assert!(row("q4_0 resident").contains(" - "), "no needles: {table}");
}

#[test]
fn a_text_that_repeats_itself_perplexes_less() {
    let Some(model) = smollm2("a_text_that_repeats_itself_perplexes_less") else {
        return;
    };
    let dir = tempfile::TempDir::new().unwrap();
    let ppl = |text: &str| {
        let file = dir.path().join("text.txt");
        std::fs::write(&file, text).unwrap();
        let args = [
            "eval",
            "ppl",
            path(&model),
            "-f",
            path(&file),
            "--chunk",
            "64",
            "--json",
        ];
        json(&stdout(&spillgate(&args)))["perplexity"]
            .as_f64()
            .unwrap()
    };
    let dull = ppl(&"The same words again. ".repeat(30));
    let noise = ppl(&(0..60)
        .map(|i| format!("{} ", i * i * 7919 % 1009))
        .collect::<String>());
    assert!(1.0 < dull && dull < 3.0 && dull < noise, "{dull} {noise}");
}

#[test]
fn bench_measures_the_cases_it_is_asked_for() {
    let Some(model) = smollm2("bench_measures_the_cases_it_is_asked_for") else {
        return;
    };
    let args = [
        "bench",
        path(&model),
        "-p",
        "16",
        "-n",
        "4",
        "-d",
        "0,32",
        "-r",
        "2",
        "--json",
    ];
    let report = json(&stdout(&spillgate(&args)));
    let cases = report["cases"].as_array().unwrap();
    let names: Vec<&str> = cases.iter().map(|c| c["case"].as_str().unwrap()).collect();
    assert_eq!(names, ["pp16", "tg4", "pp16 @ d32", "tg4 @ d32"]);
    for case in cases {
        let of = |key: &str| case[key].as_f64().unwrap();
        assert_eq!(case["tok_s"].as_array().unwrap().len(), 2);
        assert!(
            0.0 < of("min_tok_s") && of("min_tok_s") <= of("median_tok_s"),
            "{case}"
        );
        assert!(of("median_tok_s") <= of("max_tok_s"), "{case}");
    }
}

#[test]
fn needles_are_found_in_prompts_that_a_seed_decides() {
    let Some(model) = smollm2("needles_are_found_in_prompts_that_a_seed_decides") else {
        return;
    };
    let model = path(&model);
    let ask = |more: &[&str]| {
        let args = [
            "eval",
            "niah",
            model,
            "--ctx",
            "512",
            "--samples",
            "1",
            "--json",
        ];
        json(&stdout(&spillgate(&[&args[..], more].concat())))
    };
    let two = ["--task", "niah_single_1", "--task", "niah_multivalue"];
    let scores = ask(&two);
    let tasks = scores["tasks"].as_array().unwrap();
    let names: Vec<&str> = tasks.iter().map(|t| t["task"].as_str().unwrap()).collect();
    assert_eq!(names, ["niah_single_1", "niah_multivalue"]);
    assert_eq!(
        tasks[0]["score_percent"], 100.0,
        "the model can do this: {scores}"
    );
    let mean = (100.0 + tasks[1]["score_percent"].as_f64().unwrap()) / 2.0;
    assert_eq!(scores["score_percent_mean"], mean);
    assert_eq!(
        (&scores["chat_template"], &scores["complete"]),
        (&Value::from(true), &Value::from(true))
    );
    let samples = scores["samples"].as_array().unwrap();
    assert_eq!(samples.len(), 2);
    for sample in samples {
        // Up to a sentence less than what the context holds beside an answer of 128 tokens.
        let tokens = sample["prompt_tokens"].as_u64().unwrap();
        assert!((200..=384).contains(&tokens), "{sample}");
    }
    let said = |scores: &Value, key: &str| scores["samples"][0][key].clone();
    let one = ["--task", "niah_single_1"];
    let again = ask(&one);
    let seeded = ask(&[&one[..], &["--seed", "1"]].concat());
    let raw = ask(&[&one[..], &["--raw"]].concat());
    for key in ["answers", "output", "prompt_tokens"] {
        assert_eq!(said(&again, key), said(&scores, key));
    }
    assert_ne!(said(&seeded, "answers"), said(&scores, "answers"));
    assert_eq!(said(&raw, "answers"), said(&scores, "answers"));
    assert_ne!(said(&raw, "prompt_tokens"), said(&scores, "prompt_tokens"));
    assert_eq!(raw["chat_template"], false);
}

#[test]
fn needles_that_are_not_asked_for_rightly_are_refused() {
    let Some(model) = smollm2("needles_that_are_not_asked_for_rightly_are_refused") else {
        return;
    };
    for (more, code, why) in [
        (["--samples", "0"], 1, "asks nothing"),
        (["--ctx", "150"], 1, "niah_single_1: the question alone has"),
        (["--task", "niah"], 2, "niah_multivalue"),
    ] {
        let output = spillgate(&[&["eval", "niah", path(&model)], &more[..]].concat());
        assert_eq!(output.status.code(), Some(code), "{more:?}");
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
        assert!(output.stdout.is_empty(), "{output:?}");
    }
}

#[cfg(unix)]
#[test]
fn an_interrupted_search_prints_what_it_has() {
    let Some(model) = smollm2("an_interrupted_search_prints_what_it_has") else {
        return;
    };
    let mut child = Command::new(env!("CARGO_BIN_EXE_spillgate"))
        .args([
            "eval",
            "niah",
            path(&model),
            "--ctx",
            "640",
            "--samples",
            "2",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    assert!(lines.any(|line| line.unwrap().starts_with("niah_single_1: ")));
    let interrupt = Command::new("kill")
        .args(["-INT", &child.id().to_string()])
        .status();
    assert!(interrupt.unwrap().success());
    let rest: Vec<String> = lines.map(Result::unwrap).collect();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(130), "{rest:?}");
    let table = String::from_utf8(output.stdout).unwrap();
    let first: Vec<&str> = table
        .lines()
        .map(|l| l.split(' ').next().unwrap())
        .collect();
    assert_eq!(first[..2], ["task", "niah_single_1"], "{table}");
    assert_eq!(first.last(), Some(&"mean"), "{table}");
    assert!(!table.contains("niah_multiquery"), "{table}");
}

/// A run whose context is kept in a file.
fn with_session(model: &Path, file: &Path, prompt: &str, more: &[&str]) -> std::process::Output {
    let base = [
        "run",
        path(model),
        "--raw",
        prompt,
        "-n",
        "4",
        "--temp",
        "0",
        "--json",
    ];
    let session = ["--session", path(file)];
    spillgate(&[&base[..], &session, more].concat())
}

#[test]
fn a_context_is_kept_in_a_file() {
    let Some(model) = smollm2("a_context_is_kept_in_a_file") else {
        return;
    };
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("context.kv");
    let prompt = "The quick brown fox jumps over the lazy dog. ".repeat(40);
    let whole = format!("{prompt}And then the dog");
    let first = json(&stdout(&with_session(&model, &file, &prompt, &[])));
    assert_eq!(first["reused_tokens"], 0);
    let alone = json(&stdout(&with_session(
        &model,
        &dir.path().join("other.kv"),
        &whole,
        &[],
    )));
    // The same answer, less work; also where most of the cells come back to host memory.
    let sound = std::fs::read(&file).unwrap();
    for more in [&[][..], &["--window", "256"]] {
        std::fs::write(&file, &sound).unwrap();
        let next = json(&stdout(&with_session(&model, &file, &whole, more)));
        assert_eq!(next["text"], alone["text"], "{more:?}");
        let kept = next["reused_tokens"].as_u64().unwrap();
        assert!(
            kept > 350 && next["prompt_tokens"].as_u64().unwrap() < 20,
            "{next}"
        );
    }
    let refused = |more: &[&str], says: &str| {
        let output = with_session(&model, &file, &whole, more);
        assert_eq!(output.status.code(), Some(1), "{more:?}");
        assert!(stderr(&output).contains(says), "{}", stderr(&output));
    };
    refused(&["--cache-type-k", "q8_0"], "is of another cache type");
    let mut bad = sound.clone();
    bad[sound.len() / 3] ^= 4;
    std::fs::write(&file, &bad).unwrap();
    refused(&[], "is no sound session file: its digest does not match");
    assert_eq!(std::fs::read(&file).unwrap(), bad, "left as it was");
}

#[test]
fn a_conversation_goes_on_from_a_file() {
    let Some(model) = smollm2("a_conversation_goes_on_from_a_file") else {
        return;
    };
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("conversation.kv");
    let chat = |lines: &[u8], more: &[&str]| {
        let base = ["chat", path(&model), "-n", "12", "--temp", "0"];
        spillgate_with_stdin(&[&base[..], more].concat(), lines)
    };
    let (first, second) = (
        &b"My name is Bartholomew.\n"[..],
        &b"What is my name?\n"[..],
    );
    let system = ["--system", "Answer in one word."];
    let whole = stdout(&chat(&[first, second].concat(), &system));
    let session = ["--session", path(&file)];
    // A line that nobody can read ends no conversation.
    let unread = [&b"\xff\xfe\n"[..], first].concat();
    let begun = chat(&unread, &[&system[..], &session].concat());
    assert!(stderr(&begun).contains("not UTF-8"), "{}", stderr(&begun));
    let next = chat(second, &session);
    assert_eq!([stdout(&begun), stdout(&next)].concat(), whole);
    let told = stderr(&next);
    assert!(
        told.contains("goes on after 2 messages") && told.contains(" kept), "),
        "{told}"
    );
    // Another system message is another conversation's begin.
    let other = chat(second, &[&["--system", "Be brief."][..], &session].concat());
    assert!(
        stderr(&other).contains("goes on after 4 messages"),
        "{}",
        stderr(&other)
    );
    let anew = stdout(&chat(&[&b"/clear\n"[..], second].concat(), &session));
    let alone = stdout(&chat(second, &["--system", "Be brief."]));
    assert_eq!(anew, alone, "the system message of then");
}

/// Whenever a run is killed, the file is the one from before or the new one.
#[test]
#[cfg(unix)]
fn a_kept_context_survives_a_kill() {
    let Some(model) = smollm2("a_kept_context_survives_a_kill") else {
        return;
    };
    let dir = tempfile::TempDir::new().unwrap();
    let file = dir.path().join("context.kv");
    let prompt = "One two three four five six seven eight nine ten. ".repeat(30);
    let begun = std::time::Instant::now();
    stdout(&with_session(&model, &file, &prompt, &[]));
    let whole = begun.elapsed();
    let (mut old, mut new) = (0, 0);
    let rounds = 16;
    for round in 0..rounds {
        let before = std::fs::read(&file).unwrap();
        let longer = format!("{prompt}{}", "And more. ".repeat(round + 1));
        let mut child = std::process::Command::new(env!("CARGO_BIN_EXE_spillgate"))
            .args([
                "run",
                path(&model),
                "--raw",
                &longer,
                "-n",
                "1",
                "--temp",
                "0",
            ])
            .args(["--session", path(&file)])
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null())
            .spawn()
            .unwrap();
        // The last ones end by themselves.
        std::thread::sleep(whole * round as u32 / (rounds as u32 - 4));
        child.kill().unwrap();
        child.wait().unwrap();
        let after = std::fs::read(&file).unwrap();
        if after == before {
            old += 1;
        } else {
            new += 1;
        }
        let next = with_session(&model, &file, &prompt, &[]);
        assert!(next.status.success(), "round {round}: {}", stderr(&next));
        let kept = json(&stdout(&next))["reused_tokens"].as_u64().unwrap();
        assert!(kept > 200, "round {round}: {kept} tokens kept");
    }
    assert!(old > 0, "one was killed in time");
    assert!(new > 0, "one was not");
}

/// From outside: the same bytes wherever cells are.
#[test]
fn logits_are_the_same_wherever_cells_are() {
    let Some(model) = smollm2("logits_are_the_same_wherever_cells_are") else {
        return;
    };
    let dir = tempfile::TempDir::new().unwrap();
    let ids = dir.path().join("ids.txt");
    let tokens: Vec<String> = (0..1300)
        .map(|i| (i * i % 4001 + 300).to_string())
        .collect();
    std::fs::write(&ids, tokens.join(" ")).unwrap();
    let hash = |more: &[&str]| {
        let base = [
            "eval",
            "logits",
            path(&model),
            "--hash",
            "--tokens",
            path(&ids),
        ];
        let out = stdout(&spillgate(&[&base[..], more].concat()));
        out.lines().last().unwrap().to_owned()
    };
    let resident = hash(&[]);
    assert_eq!(resident.len(), 64);
    for placed in [
        &["--window", "256", "--staging", "1"][..],
        &["--window", "512", "--ubatch", "100", "--kv-share", "0"],
        &["--device-mem", "135", "--spill", "auto"],
        &[
            "--by-token",
            "--window",
            "256",
            "--kv-share",
            "0.3",
            "--staging",
            "2",
        ],
    ] {
        assert_eq!(hash(placed), resident, "{placed:?}");
    }
    let off = ["--window", "256", "--spill", "off"];
    let base = [
        "eval",
        "logits",
        path(&model),
        "--hash",
        "--tokens",
        path(&ids),
    ];
    let output = spillgate(&[&base[..], &off].concat());
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("error: "), "{}", stderr(&output));
}
