use gguf::{Metadata, StringArray, Value};
use proptest::prelude::*;

use super::*;

/// A byte-level vocabulary: the 256 bytes, then `texts`.
fn byte_level(texts: &[&str], merges: &[&str]) -> Metadata {
    let bytes = (0..=255_u8).map(|b| alphabet::encode(b).to_string());
    let tokens: StringArray = bytes.chain(texts.iter().map(|t| (*t).to_owned())).collect();
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.model", "gpt2");
    metadata.set("tokenizer.ggml.pre", "gpt-2");
    metadata.set("tokenizer.ggml.tokens", tokens);
    metadata.set(
        "tokenizer.ggml.merges",
        merges.iter().collect::<StringArray>(),
    );
    metadata
}

fn set_kinds(metadata: &mut Metadata, n_normal: usize, kinds: &[i32]) {
    let all: Vec<i32> = std::iter::repeat_n(1, n_normal)
        .chain(kinds.iter().copied())
        .collect();
    metadata.set("tokenizer.ggml.token_type", all.into_boxed_slice());
}

/// A SentencePiece vocabulary: `<unk>`, `<s>`, `</s>`, the 256 bytes, then pieces.
fn sentence_piece(pieces: &[(&str, f32, i32)]) -> Metadata {
    let bytes = (0..=255).map(|b| format!("<0x{b:02X}>"));
    let head = ["<unk>", "<s>", "</s>"]
        .into_iter()
        .map(str::to_owned)
        .chain(bytes);
    let tokens: StringArray = head.chain(pieces.iter().map(|p| p.0.to_owned())).collect();
    let scores: Vec<f32> = std::iter::repeat_n(0.0, 259)
        .chain(pieces.iter().map(|p| p.1))
        .collect();
    let kinds = [2, 3, 3]
        .into_iter()
        .chain(std::iter::repeat_n(6, 256))
        .chain(pieces.iter().map(|p| p.2));
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.model", "llama");
    metadata.set("tokenizer.ggml.tokens", tokens);
    metadata.set("tokenizer.ggml.scores", scores.into_boxed_slice());
    metadata.set("tokenizer.ggml.token_type", kinds.collect::<Box<[i32]>>());
    metadata
}

fn build(metadata: &Metadata) -> Tokenizer {
    Tokenizer::from_gguf(metadata).unwrap_or_else(|e| panic!("{e}"))
}

fn ids(tokenizer: &Tokenizer, text: impl AsRef<[u8]>) -> Vec<u32> {
    tokenizer
        .encode(text, EncodeOptions::default())
        .unwrap_or_else(|e| panic!("{e}"))
}

fn error(metadata: &Metadata) -> String {
    match Tokenizer::from_gguf(metadata) {
        Ok(_) => panic!("it was taken"),
        Err(e) => e.to_string(),
    }
}

#[test]
fn byte_level_merges_within_pieces() {
    let tokenizer = build(&byte_level(&["ab", "Ġab", "Ġa"], &["Ġ a", "a b", "Ġa b"]));
    // "Ġ a" merges before "a b".
    assert_eq!(ids(&tokenizer, "ab ab"), [256, 257]);
    assert_eq!(
        ids(&tokenizer, "a\u{FF}b"),
        [u32::from(b'a'), 0xC3, 0xBF, u32::from(b'b')]
    );
    assert_eq!(ids(&tokenizer, b"\xFF\x00"), [0xFF, 0]);
    assert_eq!(ids(&tokenizer, ""), [0_u32; 0]);
}

#[test]
fn whole_words_come_first_where_the_pattern_says_so() {
    let mut metadata = byte_level(&["abc", "bc"], &["b c"]);
    assert_eq!(ids(&build(&metadata), "abc"), [u32::from(b'a'), 257]);
    metadata.set("tokenizer.ggml.pre", "llama-bpe");
    metadata.set("tokenizer.ggml.bos_token_id", 0_u32);
    assert_eq!(ids(&build(&metadata), "abc"), [0, 256]);
}

#[test]
fn special_tokens() {
    let mut metadata = byte_level(&["<|im_end|>", "<think>", "Ġ<"], &["Ġ <"]);
    set_kinds(&mut metadata, 256, &[3, 4, 1]);
    let tokenizer = build(&metadata);
    assert_eq!(
        ids(&tokenizer, "<|im_end|><think>a"),
        [256, 257, u32::from(b'a')]
    );
    let plain = EncodeOptions {
        specials: Specials::Text,
        ..EncodeOptions::default()
    };
    let in_text = tokenizer
        .encode("<|im_end|><think>", plain)
        .expect("encodes");
    assert_eq!(in_text.len(), "<|im_end|>".len() + 1);
    assert_eq!(in_text.last(), Some(&257));
    assert_eq!(
        (tokenizer.eog(), tokenizer.eot(), tokenizer.warnings().len()),
        ([256].as_slice(), Some(256), 0)
    );
    assert_eq!(
        tokenizer
            .decode(&[256, 257, 258], DecodeOptions::default())
            .expect("decodes"),
        b"<think> <"
    );
}

#[test]
fn an_end_that_is_marked_as_text_becomes_control() {
    let tokenizer = build(&byte_level(&["<|eot_id|>", "</s>"], &[]));
    assert_eq!(
        (tokenizer.kind(256), tokenizer.kind(257)),
        (Some(TokenKind::Control), Some(TokenKind::Normal))
    );
    assert_eq!(tokenizer.eog(), [256]);
    assert!(
        tokenizer.warnings()[0].contains("<|eot_id|>"),
        "{:?}",
        tokenizer.warnings()
    );
}

#[test]
fn harmony_messages_do_not_end_the_turn() {
    let mut metadata = byte_level(&["<|end|>", "<|return|>", "<|call|>", "<|channel|>"], &[]);
    set_kinds(&mut metadata, 256, &[3, 3, 3, 3]);
    let tokenizer = build(&metadata);
    assert_eq!(tokenizer.eog(), [257, 258]);
    assert_eq!(tokenizer.kind(259), Some(TokenKind::UserDefined));
}

#[test]
fn a_merge_into_a_control_token_is_left_out() {
    let mut metadata = byte_level(&["abc", "ab"], &["a b", "ab c"]);
    set_kinds(&mut metadata, 256, &[3, 1]);
    let plain = EncodeOptions {
        specials: Specials::Text,
        ..EncodeOptions::default()
    };
    assert_eq!(
        build(&metadata).encode("abc", plain).expect("encodes"),
        [257, u32::from(b'c')]
    );
}

#[test]
fn a_missing_pre_tokenizer_is_assumed_and_said() {
    let mut metadata = byte_level(&[], &[]);
    metadata.set("tokenizer.ggml.pre", "");
    assert!(build(&metadata).warnings()[0].contains("tokenizer.ggml.pre"));
}

#[test]
fn a_byte_without_token() {
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.model", "gpt2");
    metadata.set("tokenizer.ggml.pre", "gpt-2");
    metadata.set(
        "tokenizer.ggml.tokens",
        ["a", "<unk>"].iter().collect::<StringArray>(),
    );
    metadata.set(
        "tokenizer.ggml.merges",
        [""; 0].iter().collect::<StringArray>(),
    );
    let result = build(&metadata).encode("ab", EncodeOptions::default());
    assert!(
        matches!(
            result,
            Err(TokenizerError::NoTokenForByte { byte: b'b', .. })
        ),
        "{result:?}"
    );
    metadata.set("tokenizer.ggml.unknown_token_id", 1_u32);
    assert_eq!(ids(&build(&metadata), "ab"), [0, 1]);
}

#[test]
fn sentence_piece_merges_by_score_and_falls_back_to_bytes() {
    let tokenizer = build(&sentence_piece(&[
        ("▁", -1.0, 1),
        ("a", -2.0, 1),
        ("b", -3.0, 1),
        ("ab", -8.0, 1),
        ("▁a", -5.0, 1),
        ("b▁", -9.0, 1),
    ]));
    let at = |i: u32| 259 + i;
    // BOS, then a space in front of the text.
    assert_eq!(ids(&tokenizer, "ab"), [1, at(4), at(2)]);
    assert_eq!(ids(&tokenizer, "bab"), [1, at(0), at(2), at(3)]);
    assert_eq!(
        ids(&tokenizer, "x b\u{2581}"),
        [1, at(0), 3 + 0x78, at(0), at(5)]
    );
    assert_eq!(ids(&tokenizer, "é")[2..], [3 + 0xC3, 3 + 0xA9]);
    assert_eq!(ids(&tokenizer, b"\xFFa")[2..], [3 + 0xFF, at(1)]);
    // After a special token, too.
    assert_eq!(ids(&tokenizer, "a</s>a"), [1, at(4), 2, at(4)]);
    assert_eq!(
        tokenizer
            .decode(&ids(&tokenizer, "ab b"), DecodeOptions::default())
            .expect("decodes"),
        b"ab b"
    );
    assert_eq!(
        tokenizer
            .decode(&[at(4)], DecodeOptions::CONTINUATION)
            .expect("decodes"),
        b" a"
    );
    assert_eq!(tokenizer.eog(), [2]);
}

#[test]
fn sentence_piece_without_space_prefix_or_bos() {
    let mut metadata = sentence_piece(&[("a", -2.0, 1)]);
    metadata.set("tokenizer.ggml.add_space_prefix", false);
    metadata.set("tokenizer.ggml.add_bos_token", false);
    metadata.set("tokenizer.ggml.add_eos_token", true);
    assert_eq!(ids(&build(&metadata), "a"), [259, 2]);
}

#[test]
fn unigram() {
    let mut metadata = sentence_piece(&[("▁ab", -3.0, 1), ("▁a", -1.0, 1), ("b", -1.0, 1)]);
    metadata.set("tokenizer.ggml.model", "t5");
    metadata.set("tokenizer.ggml.add_space_prefix", true);
    metadata.set("tokenizer.ggml.eos_token_id", 2_u32);
    metadata.set("tokenizer.ggml.unknown_token_id", 0_u32);
    assert_eq!(ids(&build(&metadata), "ab"), [260, 261, 2]);
    metadata.set(
        "tokenizer.ggml.precompiled_charsmap",
        vec![1_u8, 0].into_boxed_slice(),
    );
    assert!(error(&metadata).contains("precompiled_charsmap"));
}

#[test]
fn merges_over_spaces_and_lines() {
    let bytes = (0..=255).map(|b| format!("<0x{b:02X}>"));
    let tokens = ["<bos>", "▁", "a", "▁a", "\n", "\n\n"]
        .into_iter()
        .map(str::to_owned)
        .chain(bytes);
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.model", "gemma4");
    metadata.set("tokenizer.ggml.tokens", tokens.collect::<StringArray>());
    metadata.set(
        "tokenizer.ggml.merges",
        ["▁ a"].iter().collect::<StringArray>(),
    );
    metadata.set("tokenizer.ggml.bos_token_id", 0_u32);
    metadata.set("tokenizer.ggml.add_bos_token", false);
    let kinds: Vec<i32> = [3, 1, 1, 1, 1, 1]
        .into_iter()
        .chain(std::iter::repeat_n(6, 256))
        .collect();
    metadata.set("tokenizer.ggml.token_type", kinds.into_boxed_slice());
    let tokenizer = build(&metadata);
    assert_eq!(ids(&tokenizer, "a a\n\n z"), [0, 2, 3, 5, 1, 6 + 0x7A]);
    assert_eq!(
        tokenizer
            .decode(&ids(&tokenizer, "a a\n\n z"), DecodeOptions::default())
            .expect("decodes"),
        b"a a\n\n z"
    );
}

#[test]
fn damaged_files_are_refused_with_reasons() {
    let good = || byte_level(&["ab"], &["a b"]);
    let broken = |key: &str, value: Value| {
        let mut metadata = good();
        metadata.set(key, value);
        error(&metadata)
    };
    let strings = |texts: &[&str]| Value::from(texts.iter().collect::<StringArray>());
    let cases: [(&str, Value, &[&str]); 12] = [
        (
            "tokenizer.ggml.model",
            "rwkv".into(),
            &["rwkv", "gpt2", "llama"],
        ),
        (
            "tokenizer.ggml.model",
            7_u32.into(),
            &["tokenizer.ggml.model", "u32"],
        ),
        (
            "tokenizer.ggml.pre",
            "klingon".into(),
            &["klingon", "qwen2", "llama-bpe"],
        ),
        (
            "tokenizer.ggml.tokens",
            strings(&[]),
            &["tokenizer.ggml.tokens", "0 entries"],
        ),
        (
            "tokenizer.ggml.tokens",
            strings(&["a", "b"]),
            &["merge 0", "ab", "2 tokens"],
        ),
        (
            "tokenizer.ggml.tokens",
            strings(&["a", "b", "ab", "a"]),
            &["tokens 0 and 3", "\"a\""],
        ),
        (
            "tokenizer.ggml.tokens",
            1_u32.into(),
            &["tokenizer.ggml.tokens", "u32"],
        ),
        (
            "tokenizer.ggml.token_type",
            Value::from(vec![1_i32].into_boxed_slice()),
            &["1 entries", "257"],
        ),
        (
            "tokenizer.ggml.merges",
            strings(&["a b", "nonsense"]),
            &["merge 1", "nonsense"],
        ),
        (
            "tokenizer.ggml.bos_token_id",
            257_u32.into(),
            &["bos_token_id", "257"],
        ),
        (
            "tokenizer.ggml.eos_token_id",
            "two".into(),
            &["eos_token_id", "string"],
        ),
        (
            "tokenizer.ggml.add_bos_token",
            true.into(),
            &["bos_token_id"],
        ),
    ];
    for (key, value, words) in cases {
        let message = broken(key, value);
        assert!(
            words.iter().all(|word| message.contains(word)),
            "{key}: {message}"
        );
    }
    let mut long = good();
    long.set("tokenizer.ggml.tokens", strings(&["a", &"x".repeat(5000)]));
    assert!(error(&long).contains("token 1 has 5000 bytes"));
    assert!(error(&Metadata::new()).contains("tokenizer.ggml.model"));
    let mut none = Metadata::new();
    none.set("tokenizer.ggml.model", "gpt2");
    assert!(error(&none).contains("tokenizer.ggml.tokens"));
    none.set("tokenizer.ggml.tokens", strings(&["a"]));
    assert!(error(&none).contains("tokenizer.ggml.merges"));
}

#[test]
fn damaged_scores_and_byte_tokens_are_refused() {
    assert!(error(&sentence_piece(&[("a", f32::NAN, 1)])).contains("259"));
    assert!(error(&sentence_piece(&[("<0xGG>", 0.0, 6)])).contains("<0xGG>"));
    let mut metadata = sentence_piece(&[("a", 0.0, 1)]);
    metadata.set("tokenizer.ggml.scores", vec![0.0_f32].into_boxed_slice());
    assert!(error(&metadata).contains("tokenizer.ggml.scores"));
}

#[test]
fn minus_one_means_none() {
    let mut metadata = byte_level(&[], &[]);
    metadata.set("tokenizer.ggml.padding_token_id", u32::MAX);
    metadata.set("tokenizer.ggml.eos_token_id", -1_i32);
    let tokenizer = build(&metadata);
    assert_eq!((tokenizer.pad(), tokenizer.eos()), (None, None));
}

#[test]
fn tokens_that_contain_a_text() {
    let tokenizer = build(&byte_level(&["ab", "cabd"], &[]));
    assert_eq!(tokenizer.tokens_with("ab"), [256, 257]);
    assert_eq!(tokenizer.tokens_with("c"), [u32::from(b'c'), 257]);
    assert_eq!(tokenizer.tokens_with(""), [0_u32; 0]);
}

#[test]
fn asking_for_what_is_not_there_is_an_error() {
    let tokenizer = build(&byte_level(&[], &[]));
    let bos = tokenizer.encode(
        "a",
        EncodeOptions {
            bos: Affix::Always,
            ..EncodeOptions::default()
        },
    );
    assert!(matches!(
        bos,
        Err(TokenizerError::NoSuchSpecial { which: "BOS", .. })
    ));
    let decoded = tokenizer.decode(&[1, 256], DecodeOptions::default());
    assert!(matches!(
        decoded,
        Err(TokenizerError::IdOutOfRange {
            id: 256,
            n_vocab: 256
        })
    ));
}

/// Found by the property below.
#[test]
fn an_unused_token_may_have_anothers_text() {
    let mut metadata = Metadata::new();
    metadata.set("tokenizer.ggml.model", "t5");
    metadata.set(
        "tokenizer.ggml.tokens",
        ["", " ", " "].iter().collect::<StringArray>(),
    );
    metadata.set(
        "tokenizer.ggml.token_type",
        vec![1, 5, 1].into_boxed_slice(),
    );
    metadata.set(
        "tokenizer.ggml.scores",
        vec![-1.0_f32; 3].into_boxed_slice(),
    );
    metadata.set("tokenizer.ggml.unknown_token_id", 0_u32);
    let tokenizer = Tokenizer::from_gguf(&metadata).expect("a vocabulary that can be used");
    let ids = tokenizer
        .encode(" m", EncodeOptions::default())
        .expect("ids");
    // The space, the unknown letter, and the end that this kind adds.
    assert_eq!(ids, [2, 0, 1]);
}

proptest! {
    /// Whatever a file says, it is taken or refused, and what is taken encodes.
    #[test]
    fn any_vocabulary_is_taken_or_refused(
        model in prop::sample::select(parts::MODELS),
        tokens in proptest::collection::vec("[ab▁Ġ <>]{0,4}|<0x4[0-9]>|<\\|im_end\\|>", 1..12),
        kinds in proptest::collection::vec(0_i32..8, 12),
        merges in proptest::collection::vec("[abĠ▁]{1,2} [abĠ▁]{1,2}", 0..4),
        text in "[ab <>▁\\n|im_end]{0,20}",
    ) {
        let n = tokens.len();
        let mut metadata = Metadata::new();
        metadata.set("tokenizer.ggml.model", model);
        metadata.set("tokenizer.ggml.pre", "qwen2");
        metadata.set("tokenizer.ggml.tokens", tokens.iter().collect::<StringArray>());
        metadata.set("tokenizer.ggml.token_type", kinds[..n].to_vec().into_boxed_slice());
        metadata.set("tokenizer.ggml.merges", merges.iter().collect::<StringArray>());
        metadata.set("tokenizer.ggml.scores", vec![-1.0_f32; n].into_boxed_slice());
        metadata.set("tokenizer.ggml.bos_token_id", 0_u32);
        metadata.set("tokenizer.ggml.unknown_token_id", 0_u32);
        if let Ok(tokenizer) = Tokenizer::from_gguf(&metadata) {
            let ids = tokenizer.encode(&text, EncodeOptions::default());
            prop_assert!(ids.is_ok_and(|ids| ids.iter().all(|&id| (id as usize) < n)));
        }
    }
}
