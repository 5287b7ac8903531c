//! Which tokens end a generation, and what files get wrong about the types of such tokens.
//!
//! Files name one or two (EOS, sometimes EOT) while models stop on several, so the rest is told by well-known texts.

use super::parts::Parts;
use super::vocab::TokenKind;

/// Ends of a turn, in the order of preference for *the* end of a turn where the file names none.
const TURN_ENDS: &[&str] = &[
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<turn|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
    "[EOT]",
    "<EOT>",
    "_<EOT>",
    "<|end_of_text|>",
    "<|endoftext|>",
];

/// Other texts that end a generation.
const OTHER_ENDS: &[&str] = &[
    MESSAGE_END,
    "<|return|>",
    "<|call|>",
    "<|calls|>",
    "<|flush|>",
    MARKUP_OR_END,
    "[EOS]",
    "<eos>",
    "<|tool_response>",
    "[e~[",
];

/// The end of a message that is not the end of the turn.
const MESSAGE_END: &str = "<|eom_id|>";

/// The end of a text in some vocabularies, a tag of HTML in others (Gemma): the end only where the file calls it control.
const MARKUP_OR_END: &str = "</s>";

/// Padding and separators of fill-in-the-middle training: nothing that belongs to an answer follows them. One of each row.
const FILL_ENDS: &[&[&str]] = &[
    &["<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"],
    &[
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<REPO>",
        "<reponame>",
    ],
    &["<|file_sep|>"],
];

/// Marks of the "harmony" format that structure an answer and are to be seen.
const SHOWN_MARKS: &[&str] = &["<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"];

/// What was found.
pub(super) struct Ends {
    /// Sorted.
    pub(super) ids: Vec<u32>,
    pub(super) warnings: Vec<String>,
}

/// The well-known texts of a vocabulary and where they are.
struct Known {
    found: Vec<(&'static str, u32)>,
}

impl Known {
    fn search(parts: &Parts<'_>) -> Self {
        let mut texts: Vec<&'static str> = [TURN_ENDS, OTHER_ENDS, SHOWN_MARKS]
            .into_iter()
            .chain(FILL_ENDS.iter().copied())
            .flatten()
            .copied()
            .collect();
        texts.sort_unstable();
        let is_known = |text: &[u8]| {
            texts
                .binary_search_by(|known| known.as_bytes().cmp(text))
                .ok()
        };
        let found = (0..)
            .zip(parts.tokens.iter())
            .filter_map(|(id, text)| Some((texts[is_known(text)?], id)))
            .collect();
        Known { found }
    }

    fn id(&self, text: &str) -> Option<u32> {
        self.found
            .iter()
            .find(|(known, _)| *known == text)
            .map(|&(_, id)| id)
    }
}

/// Finds all ends, fills `parts.roles` and corrects `parts.kinds`.
pub(super) fn find(parts: &mut Parts<'_>) -> Ends {
    let known = Known::search(parts);
    let mut ids: Vec<u32> = Vec::new();
    let mut warnings = Vec::new();
    let first_of = |texts: &[&str]| texts.iter().find_map(|text| known.id(text));

    for row in FILL_ENDS {
        ids.extend(first_of(row));
    }
    for &text in TURN_ENDS.iter().chain(OTHER_ENDS) {
        let Some(id) = known.id(text) else { continue };
        let kind = &mut parts.kinds[id as usize];
        if text == MARKUP_OR_END && *kind != TokenKind::Control {
            continue;
        }
        ids.push(id);
        if *kind != TokenKind::Control {
            warnings.push(format!("token {id} ({text}) ends a turn but is not marked as a control token; it is taken as one"));
            *kind = TokenKind::Control;
        }
    }
    let roles = &mut parts.roles;
    roles.eot = roles.eot.or_else(|| first_of(TURN_ENDS));
    roles.eom = roles.eom.or_else(|| known.id(MESSAGE_END));
    ids.extend([roles.eos, roles.eot, roles.eom].into_iter().flatten());

    for text in SHOWN_MARKS {
        if let Some(id) = known.id(text) {
            parts.kinds[id as usize] = TokenKind::UserDefined;
        }
    }
    // Harmony ends messages with <|end|> and turns with the others.
    let has = |text: &str| known.id(text).is_some();
    let calls = has("<|call|>") || has("<|calls|>");
    if let Some(end) = known.id("<|end|>")
        && calls
        && (has("<|return|>") || has("<|flush|>"))
    {
        ids.retain(|&id| id != end);
        parts.kinds[end as usize] = TokenKind::UserDefined;
    }
    ids.sort_unstable();
    ids.dedup();
    Ends { ids, warnings }
}
