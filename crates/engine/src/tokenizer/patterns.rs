//! The pre-tokenizer patterns that models were trained with, by the names that files give them (`tokenizer.ggml.pre`).
//!
//! A pre-tokenizer is a list of stages; each cuts every piece that the stage before left, keeping matches and gaps.
//! The patterns are in the small regular language of [`super::splitter`].

/// One pre-tokenizer.
pub(super) struct Pattern {
    /// Names in files.
    pub(super) names: &'static [&'static str],
    /// The stages.
    pub(super) stages: &'static [&'static str],
    /// A piece that is a token as a whole is that token, whatever the merges would make of it.
    pub(super) whole_words_first: bool,
    /// Whether BOS is added where the file does not say.
    pub(super) add_bos: bool,
}

const fn plain(names: &'static [&'static str], stages: &'static [&'static str]) -> Pattern {
    Pattern {
        names,
        stages,
        whole_words_first: false,
        add_bos: false,
    }
}

/// English contractions, in either case.
macro_rules! contractions {
    () => {
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
    };
}
/// What follows the word part in most patterns: runs of other characters, line ends, spaces.
macro_rules! tail {
    () => {
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    };
}
/// The same, with slashes taken along.
macro_rules! tail_slash {
    () => {
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    };
}
/// A word whose capitals come first, and then one that may be all capitals.
macro_rules! capitalised {
    ($suffix:expr) => {
        concat!(
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
            $suffix,
            r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
            $suffix
        )
    };
}

const GPT2: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";
const LLAMA3: &str = concat!(
    contractions!(),
    r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}",
    tail!()
);
const QWEN2: &str = concat!(contractions!(), r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}", tail!());
const GPT4O: &str = concat!(
    capitalised!(r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"),
    r"|\p{N}{1,3}",
    tail_slash!()
);
const DEEPSEEK_V3: &str = concat!(
    r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"##,
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
);
const CJK: &str = "[一-龥\u{3040}-ゟ゠-ヿ]+";
const NOT_PUNCTUATION: &str = " ?[^(\\s|.,!?…。，、।۔،)]+";

/// Letters with case, as listed in the tokenizers of the DeepSeek LLM family.
const CASED_WORDS: &str = concat!(
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1F7Dᾀ-ᾴᾶ-ᾼ\u1FBE",
    r"ῂ-ῄῆ-ῌῐ-\u1FD3ῖ-\u1FDBῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212A-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ",
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
);

/// Every known pre-tokenizer.
pub(super) const PATTERNS: &[Pattern] = &[
    plain(
        &["default"],
        &[r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9]{3}"],
    ),
    plain(
        &[
            "gpt-2",
            "phi-2",
            "jina-es",
            "jina-de",
            "jina-v2-es",
            "jina-v2-de",
            "jina-v1-en",
            "jina-v2-code",
            "roberta-bpe",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "modern-bert",
            "mpt",
            "olmo",
            "jais",
            "trillion",
            "granite-docling",
            "exaone4",
        ],
        &[GPT2],
    ),
    Pattern {
        names: &[
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "midm-2.0",
            "lfm2",
            "jina-v5-nano",
        ],
        stages: &[LLAMA3],
        whole_words_first: true,
        add_bos: true,
    },
    plain(&["dbrx", "smaug-bpe", "chatglm-bpe"], &[LLAMA3]),
    Pattern {
        names: &["glm4", "glm5"],
        stages: &[LLAMA3],
        whole_words_first: true,
        add_bos: false,
    },
    plain(
        &[
            "qwen2",
            "deepseek-r1-qwen",
            "kormo",
            "f2llmv2",
            "stablelm2",
            "megrez",
            "hunyuan",
            "solar-open",
            "grok-2",
        ],
        &[QWEN2],
    ),
    plain(
        &["qwen35"],
        &[concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        )],
    ),
    plain(
        &[
            "smollm",
            "starcoder",
            "refact",
            "command-r",
            "codeshell",
            "exaone",
            "minerva-7b",
            "mellum2",
        ],
        &[r"\p{N}", GPT2],
    ),
    plain(&["falcon"], &[r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9]{3}"]),
    plain(
        &["deepseek-llm"],
        &[
            r"[\r\n]",
            CASED_WORDS,
            "\\s?[!-/:-~！-／：-～‘-‟\u{3000}-。]+",
            r"\s+$",
            "[一-龥ࠀ-一가-\u{D7FF}]+",
            r"\p{N}+",
        ],
    ),
    plain(
        &["deepseek-coder"],
        &[
            r"[\r\n]",
            r"\s?\p{L}+",
            r"\s?\p{P}+",
            "[一-龥ࠀ-一가-\u{D7FF}]+",
            r"\p{N}",
        ],
    ),
    plain(
        &["deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4"],
        &[r"\p{N}{1,3}", CJK, DEEPSEEK_V3],
    ),
    plain(
        &["gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2"],
        &[GPT4O],
    ),
    Pattern {
        names: &["granite-embed-multi-97m"],
        stages: &[GPT4O],
        whole_words_first: true,
        add_bos: false,
    },
    Pattern {
        names: &["tekken"],
        stages: &[concat!(capitalised!(""), r"|\p{N}", tail_slash!())],
        whole_words_first: true,
        add_bos: true,
    },
    plain(&["poro-chat", "bloom", "gpt3-finnish"], &[NOT_PUNCTUATION]),
    plain(&["viking"], &[NOT_PUNCTUATION, r"\p{N}"]),
    plain(
        &["seed-coder"],
        &[concat!(
            contractions!(),
            r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"
        )],
    ),
    plain(
        &["bailingmoe", "bailingmoe2", "llada-moe"],
        &[concat!(
            r"(?i:'s|'d|'m|'t|'ll|'ve|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]",
            r"|\s+(?!\S)|\s+"
        )],
    ),
    Pattern {
        names: &["minicpm5"],
        stages: &[
            r"\p{N}{1,3}",
            concat!(
                contractions!(),
                r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}+",
                tail!()
            ),
        ],
        whole_words_first: true,
        add_bos: false,
    },
    plain(
        &["ufakzeka"],
        &[concat!(r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}", tail!())],
    ),
    plain(&["laguna"], &[r"[^\n]+|\n+", QWEN2]),
];

/// The pattern of SentencePiece-like BPE (`tokenizer.ggml.model` = `gemma4`): lines.
pub(super) const LINES: &str = r"[^\n]+|\n+";

/// The pattern with this name.
pub(super) fn find(name: &str) -> Option<&'static Pattern> {
    PATTERNS.iter().find(|p| p.names.contains(&name))
}

/// All names, for messages.
pub(super) fn names() -> Vec<&'static str> {
    PATTERNS
        .iter()
        .flat_map(|p| p.names.iter().copied())
        .collect()
}
