//! What templates expect of Python beyond the template language: methods of strings, JSON and printing in Python's style.

use std::fmt::Write as _;

use minijinja::value::{Kwargs, Value, ValueKind, from_args};
use minijinja::{Error, ErrorKind, Output, State};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter, Serializer};

/// Methods that neither the language nor its Python compatibility has; those come next.
pub(super) fn call_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    let Some(text) = value.as_str() else {
        return minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args);
    };
    match method {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(text.strip_prefix(prefix).unwrap_or(text).into())
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(text.strip_suffix(suffix).unwrap_or(text).into())
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            let (before, after) = text.split_once(separator).unwrap_or((text, ""));
            let found = if text.contains(separator) {
                separator
            } else {
                ""
            };
            Ok([before, found, after]
                .into_iter()
                .map(Value::from)
                .collect())
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let (before, after) = text.rsplit_once(separator).unwrap_or(("", text));
            let found = if text.contains(separator) {
                separator
            } else {
                ""
            };
            Ok([before, found, after]
                .into_iter()
                .map(Value::from)
                .collect())
        }
        "rsplit" => {
            let (separator, most): (Option<&str>, Option<i64>) = from_args(args)?;
            let most = most
                .and_then(|n| usize::try_from(n).ok())
                .map_or(usize::MAX, |n| n.saturating_add(1));
            let mut parts: Vec<&str> = match separator {
                Some("") => return Err(Error::new(ErrorKind::InvalidOperation, "empty separator")),
                Some(separator) => text.rsplitn(most, separator).collect(),
                None => rsplit_spaces(text, most),
            };
            parts.reverse();
            Ok(parts.into_iter().map(Value::from).collect())
        }
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args),
    }
}

/// At most `most` words, from the end; the last of them is all that is left.
fn rsplit_spaces(text: &str, most: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut rest = text.trim();
    while !rest.is_empty() {
        let cut = if parts.len() + 1 < most {
            rest.rfind(char::is_whitespace)
        } else {
            None
        };
        let Some(at) = cut else {
            parts.push(rest);
            break;
        };
        let width = rest[at..].chars().next().map_or(0, char::len_utf8);
        parts.push(&rest[at + width..]);
        rest = rest[..at].trim_end();
    }
    parts
}

/// Prints a value as Python does: `True`, `None`, `{'a': 1}`. Undefined values print nothing.
pub(super) fn print(
    out: &mut Output<'_>,
    _: &mut State<'_, '_>,
    value: &Value,
) -> Result<(), Error> {
    out.write_str(&to_text(value)).map_err(Error::from)
}

/// `str(value)`.
pub(super) fn to_text(value: &Value) -> String {
    match value.kind() {
        ValueKind::Undefined => String::new(),
        ValueKind::String => value
            .as_str()
            .map_or_else(|| value.to_string(), str::to_owned),
        _ => {
            let mut out = String::new();
            repr(value, &mut out);
            out
        }
    }
}

/// `repr(value)`.
fn repr(value: &Value, out: &mut String) {
    match value.kind() {
        ValueKind::Undefined | ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::String => quote(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq => {
            let tuple = value.is_tuple();
            out.push(if tuple { '(' } else { '[' });
            for (i, item) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&item, out);
            }
            if tuple && value.len() == Some(1) {
                out.push(',');
            }
            out.push(if tuple { ')' } else { ']' });
        }
        ValueKind::Map => {
            out.push('{');
            for (i, key) in value.try_iter().into_iter().flatten().enumerate() {
                out.push_str(if i > 0 { ", " } else { "" });
                repr(&key, out);
                out.push_str(": ");
                repr(&value.get_item(&key).unwrap_or_default(), out);
            }
            out.push('}');
        }
        _ => write!(out, "{value}").expect("a String takes everything"),
    }
}

fn quote(text: &str, out: &mut String) {
    let mark = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(mark);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\\' => out.push_str("\\\\"),
            c if c == mark => out.extend(['\\', c]),
            c if c.is_control() => {
                write!(out, "\\x{:02x}", u32::from(c)).expect("a String takes everything")
            }
            c => out.push(c),
        }
    }
    out.push(mark);
}

/// The filter `tojson` as chat templates know it: `json.dumps` without escapes for HTML.
pub(super) fn to_json(
    value: &Value,
    indent: Option<usize>,
    options: Kwargs,
) -> Result<Value, Error> {
    let indent = options
        .get::<Option<usize>>("indent")?
        .or(indent)
        .map(|n| " ".repeat(n.min(16)));
    let ascii = options
        .get::<Option<bool>>("ensure_ascii")?
        .unwrap_or(false);
    let sorted = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    options.assert_all_used()?;
    let (comma, colon) = match separators.as_deref() {
        None if indent.is_some() => (",".to_owned(), ": ".to_owned()),
        None => (", ".to_owned(), ": ".to_owned()),
        Some([comma, colon]) => (comma.clone(), colon.clone()),
        Some(_) => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                "tojson: separators must be two texts",
            ));
        }
    };
    let mut json = serde_json::to_value(value)
        .map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    if sorted {
        json.sort_all_objects();
    }
    let pretty = indent
        .as_deref()
        .map(|indent| PrettyFormatter::with_indent(indent.as_bytes()));
    let mut out = Vec::new();
    json.serialize(&mut Serializer::with_formatter(
        &mut out,
        PythonJson {
            comma,
            colon,
            ascii,
            pretty,
        },
    ))
    .map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    let text = String::from_utf8(out).expect("JSON is UTF-8");
    Ok(Value::from(text))
}

/// Writes JSON with Python's spaces.
struct PythonJson<'i> {
    comma: String,
    colon: String,
    ascii: bool,
    pretty: Option<PrettyFormatter<'i>>,
}

impl PythonJson<'_> {
    fn separate<W: ?Sized + std::io::Write>(
        &self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        if first {
            Ok(())
        } else {
            writer.write_all(self.comma.as_bytes())
        }
    }
}

impl Formatter for PythonJson<'_> {
    fn begin_array<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        match &mut self.pretty {
            Some(pretty) => pretty.begin_array(writer),
            None => writer.write_all(b"["),
        }
    }

    fn end_array<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        match &mut self.pretty {
            Some(pretty) => pretty.end_array(writer),
            None => writer.write_all(b"]"),
        }
    }

    fn begin_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.separate(writer, first)?;
        // As a first value it brings the line end and indent alone.
        self.pretty
            .as_mut()
            .map_or(Ok(()), |pretty| pretty.begin_array_value(writer, true))
    }

    fn end_array_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        self.pretty
            .as_mut()
            .map_or(Ok(()), |pretty| pretty.end_array_value(writer))
    }

    fn begin_object<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        match &mut self.pretty {
            Some(pretty) => pretty.begin_object(writer),
            None => writer.write_all(b"{"),
        }
    }

    fn end_object<W: ?Sized + std::io::Write>(&mut self, writer: &mut W) -> std::io::Result<()> {
        match &mut self.pretty {
            Some(pretty) => pretty.end_object(writer),
            None => writer.write_all(b"}"),
        }
    }

    fn begin_object_key<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        first: bool,
    ) -> std::io::Result<()> {
        self.separate(writer, first)?;
        self.pretty
            .as_mut()
            .map_or(Ok(()), |pretty| pretty.begin_object_key(writer, true))
    }

    fn begin_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        writer.write_all(self.colon.as_bytes())
    }

    fn end_object_value<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
    ) -> std::io::Result<()> {
        self.pretty
            .as_mut()
            .map_or(Ok(()), |pretty| pretty.end_object_value(writer))
    }

    fn write_string_fragment<W: ?Sized + std::io::Write>(
        &mut self,
        writer: &mut W,
        text: &str,
    ) -> std::io::Result<()> {
        if !self.ascii {
            return writer.write_all(text.as_bytes());
        }
        for c in text.chars() {
            if c.is_ascii() {
                writer.write_all(&[c as u8])?;
            } else {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    write!(writer, "\\u{unit:04x}")?;
                }
            }
        }
        Ok(())
    }
}
