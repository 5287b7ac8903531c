//! Real vocabularies: equality with the reference, round trips, speed.

mod common;

use std::sync::LazyLock;
use std::time::{Duration, Instant};

use engine::tokenizer::{
    Affix, ControlText, DecodeOptions, Detokenizer, EncodeOptions, LeadingSpace, Specials,
    TokenKind, Tokenizer,
};
use proptest::prelude::*;
use serde::Deserialize;

fn load(name: &str) -> Tokenizer {
    let tokenizer = Tokenizer::from_gguf(common::model(name).metadata())
        .unwrap_or_else(|e| panic!("{name}: {e}"));
    assert_eq!(tokenizer.warnings(), [""; 0], "{name}");
    tokenizer
}

static SMOLLM2: LazyLock<Tokenizer> = LazyLock::new(|| load("smollm2"));
static QWEN: LazyLock<Tokenizer> = LazyLock::new(|| load("qwen2.5-0.5b"));
static GEMMA: LazyLock<Tokenizer> = LazyLock::new(|| load("gemma3-270m"));

#[derive(Deserialize)]
struct Line {
    text: String,
    ids: Vec<u32>,
}

fn equal_to_reference(tokenizer: &Tokenizer, lines: &str) {
    let mut n = 0;
    let mut wrong = Vec::new();
    for line in lines.lines() {
        let Line { text, ids } = serde_json::from_str(line).expect("a line of the reference");
        let ours = tokenizer
            .encode(&text, EncodeOptions::VERBATIM)
            .expect("encodes");
        n += 1;
        if ours != ids {
            wrong.push(format!("{text:?}\n  expected {ids:?}\n  got      {ours:?}"));
        }
    }
    assert!(
        wrong.is_empty(),
        "{} of {n} differ:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
    assert!(n >= 290, "only {n} lines");
}

#[test]
fn smollm2_equals_the_reference() {
    equal_to_reference(
        &SMOLLM2,
        include_str!("data/reference/smollm2-135m-instruct.tokens.jsonl"),
    );
}

#[test]
fn qwen_equals_the_reference() {
    equal_to_reference(
        &QWEN,
        include_str!("data/reference/qwen2.5-0.5b-instruct.tokens.jsonl"),
    );
}

#[test]
fn gemma_equals_the_reference() {
    equal_to_reference(
        &GEMMA,
        include_str!("data/reference/gemma-3-270m.tokens.jsonl"),
    );
}

#[test]
fn roles_and_ends() {
    let names = |t: &Tokenizer, ids: &[u32]| -> Vec<String> {
        ids.iter()
            .map(|&id| String::from_utf8_lossy(t.token_bytes(id).expect("in range")).into_owned())
            .collect()
    };
    assert_eq!(
        names(&QWEN, QWEN.eog()),
        [
            "<|endoftext|>",
            "<|im_end|>",
            "<|fim_pad|>",
            "<|repo_name|>",
            "<|file_sep|>"
        ]
    );
    assert_eq!(QWEN.eot(), Some(151_645));
    assert_eq!(
        (QWEN.adds_bos(), QWEN.adds_eos(), QWEN.n_vocab()),
        (false, false, 151_936)
    );
    assert!(
        SMOLLM2.is_eog(2) && !SMOLLM2.is_eog(1),
        "<|im_end|> ends, <|im_start|> does not"
    );
    assert_eq!(names(&GEMMA, GEMMA.eog()), ["<eos>", "<end_of_turn>"]);
    assert_eq!(
        (GEMMA.bos(), GEMMA.adds_bos(), GEMMA.n_vocab()),
        (Some(2), true, 262_144)
    );
    assert_eq!(GEMMA.kind(2), Some(TokenKind::Control));
    assert_eq!(
        (GEMMA.kind(262_144), GEMMA.token_bytes(262_144)),
        (None, None)
    );
}

#[test]
fn specials_are_parsed_or_not() {
    let text = "<|im_start|>user\nhi<|im_end|>";
    let parsed = QWEN
        .encode(text, EncodeOptions::default())
        .expect("encodes");
    assert_eq!(parsed, [151_644, 872, 198, 6023, 151_645]);
    let plain = QWEN
        .encode(
            text,
            EncodeOptions {
                specials: Specials::Text,
                ..EncodeOptions::default()
            },
        )
        .expect("encodes");
    assert!(
        plain
            .iter()
            .all(|&id| QWEN.kind(id) == Some(TokenKind::Normal)),
        "{plain:?}"
    );
    assert_eq!(
        QWEN.decode(&plain, DecodeOptions::default())
            .expect("decodes"),
        text.as_bytes()
    );
    assert_eq!(
        QWEN.decode(&parsed, DecodeOptions::default())
            .expect("decodes"),
        b"user\nhi"
    );
    let shown = DecodeOptions {
        control: ControlText::Show,
        ..DecodeOptions::default()
    };
    assert_eq!(
        QWEN.decode(&parsed, shown).expect("decodes"),
        text.as_bytes()
    );
}

#[test]
fn bos_and_eos() {
    let ids = |bos, eos| {
        GEMMA
            .encode(
                "Hello world",
                EncodeOptions {
                    bos,
                    eos,
                    ..EncodeOptions::default()
                },
            )
            .expect("encodes")
    };
    assert_eq!(ids(Affix::AsModel, Affix::AsModel), [2, 9259, 1902]);
    assert_eq!(ids(Affix::Never, Affix::Always), [9259, 1902, 1]);
    assert_eq!(ids(Affix::Once, Affix::Once), [2, 9259, 1902]);
    let written = GEMMA.encode("<bos>Hello world", EncodeOptions::CHAT);
    assert_eq!(written.expect("encodes"), [2, 9259, 1902]);
    assert_eq!(
        QWEN.encode("", EncodeOptions::CHAT).expect("encodes"),
        [0_u32; 0]
    );
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32], options: DecodeOptions) -> String {
    let mut detokenizer = Detokenizer::new(tokenizer, options);
    let mut text = String::new();
    for &id in ids {
        text.push_str(detokenizer.push(id).expect("in range"));
    }
    text.push_str(detokenizer.finish());
    text
}

fn round_trip(tokenizer: &Tokenizer, text: &[u8]) -> Result<(), TestCaseError> {
    for specials in [Specials::Parse, Specials::Text] {
        let options = EncodeOptions {
            specials,
            ..EncodeOptions::VERBATIM
        };
        let ids = tokenizer
            .encode(text, options)
            .map_err(|e| TestCaseError::fail(e.to_string()))?;
        let shown = DecodeOptions {
            control: ControlText::Show,
            ..DecodeOptions::default()
        };
        let decoded = tokenizer
            .decode(&ids, shown)
            .map_err(|e| TestCaseError::fail(e.to_string()))?;
        prop_assert_eq!(&decoded, text);
        prop_assert_eq!(
            streamed(tokenizer, &ids, shown),
            String::from_utf8_lossy(text)
        );
    }
    Ok(())
}

/// Text that is hard on tokenizers: any characters, and many near special tokens, spaces and digits.
fn texts() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        "\\PC{0,12}",
        "[a-zA-Z' ]{0,16}",
        "[ \\t\\r\\n]{0,9}",
        "[0-9.,]{0,9}",
        "[\u{300}-\u{36F}\u{4E00}-\u{4E40}\u{1F600}-\u{1F640}\u{AC00}-\u{AC20}]{0,6}",
        Just("<|im_start|>".to_owned()),
        Just("<|im_end".to_owned()),
        Just("<end_of_turn>".to_owned()),
        Just("<0x41>".to_owned()),
    ];
    proptest::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_text_comes_back(text in texts()) {
        round_trip(&SMOLLM2, text.as_bytes())?;
        round_trip(&QWEN, text.as_bytes())?;
        // SentencePiece spells spaces with this sign and cannot tell them apart.
        round_trip(&GEMMA, text.replace('\u{2581}', "_").as_bytes())?;
    }

    #[test]
    fn any_bytes_come_back(bytes in proptest::collection::vec(any::<u8>(), 0..60)) {
        round_trip(&QWEN, &bytes)?;
        round_trip(&GEMMA, &bytes)?;
    }

    #[test]
    fn any_tokens_stream_like_they_decode(ids in proptest::collection::vec(0_u32..49_152, 0..40), keep in any::<bool>()) {
        for tokenizer in [&*SMOLLM2, &*QWEN, &*GEMMA] {
            let leading_space = if keep { LeadingSpace::Keep } else { LeadingSpace::Strip };
            let options = DecodeOptions { leading_space, ..DecodeOptions::default() };
            let decoded = tokenizer.decode(&ids, options).expect("in range");
            prop_assert_eq!(streamed(tokenizer, &ids, options), String::from_utf8_lossy(&decoded));
        }
    }
}

#[test]
fn a_character_never_comes_in_parts() {
    let text = "a🦀日本e\u{301}";
    for tokenizer in [&*SMOLLM2, &*QWEN, &*GEMMA] {
        let ids = tokenizer
            .encode(text, EncodeOptions::VERBATIM)
            .expect("encodes");
        let mut detokenizer = Detokenizer::new(tokenizer, DecodeOptions::CONTINUATION);
        let pieces: Vec<String> = ids
            .iter()
            .map(|&id| detokenizer.push(id).expect("in range").to_owned())
            .collect();
        assert_eq!(pieces.concat(), text);
        assert_eq!(detokenizer.finish(), "");
        assert!(!pieces.concat().contains('\u{FFFD}'));
    }
    // The first two bytes of a crab, then something else.
    let crab = QWEN
        .encode(&"🦀".as_bytes()[..2], EncodeOptions::VERBATIM)
        .expect("encodes");
    assert_eq!(
        streamed(
            &QWEN,
            &[crab, vec![64]].concat(),
            DecodeOptions::CONTINUATION
        ),
        "\u{FFFD}a"
    );
}

/// Bounds are several times what a slow, busy machine takes; quadratic work on these texts would take hours.
#[test]
fn long_texts_are_quick() {
    let prose = include_str!("data/reference/texts.json").repeat(520);
    let languages = include_str!("data/reference/gemma-3-270m.tokens.jsonl").repeat(13);
    let texts = [
        ("prose", prose),
        ("languages", languages),
        ("one letter", "a".repeat(1 << 20)),
        ("spaces", " ".repeat(1 << 20)),
        ("line ends", "\n".repeat(1 << 20)),
        ("letters", "abcdefghij".repeat(100_000)),
        ("marks", "<|<|im_start".repeat(90_000)),
        ("characters", "\u{10FFFF}日".repeat(150_000)),
    ];
    for (model, tokenizer) in [
        ("smollm2", &*SMOLLM2),
        ("qwen2.5", &*QWEN),
        ("gemma3", &*GEMMA),
    ] {
        for (name, text) in &texts {
            let start = Instant::now();
            let ids = tokenizer
                .encode(text, EncodeOptions::VERBATIM)
                .expect("encodes");
            let taken = start.elapsed();
            println!(
                "{model}: {name}, {} bytes, {} tokens: {taken:?}",
                text.len(),
                ids.len()
            );
            assert!(
                taken < Duration::from_secs(10),
                "{model}: {name}: {taken:?}"
            );
        }
    }
}

#[test]
fn a_vocabulary_loads_quickly() {
    for name in ["smollm2", "qwen2.5-0.5b", "gemma3-270m"] {
        let file = common::model(name);
        let start = Instant::now();
        Tokenizer::from_gguf(file.metadata()).expect("builds");
        let taken = start.elapsed();
        println!("{name}: {taken:?}");
        assert!(taken < Duration::from_secs(5), "{name}: {taken:?}");
    }
}
