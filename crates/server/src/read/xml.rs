//! Calls as `<function=f><parameter=x>value</parameter></function>`.

use super::Tool;
use serde_json::{Map, Value};

/// The name and the arguments of a call; `None` if it is none.
pub fn call(text: &str, tools: &[Tool]) -> Option<(String, String)> {
    let (_, text) = text.split_once("<function=")?;
    let (name, mut rest) = text.split_once('>')?;
    let tool = tools.iter().find(|tool| tool.name == name.trim())?;
    let mut arguments = Map::new();
    while let Some((_, parameter)) = rest.split_once("<parameter=") {
        let (key, after) = parameter.split_once('>')?;
        let (value, after) = match after.split_once("</parameter>") {
            Some(both) => both,
            None => (after.split("</function>").next().unwrap_or(after), ""),
        };
        // One line end belongs to each mark.
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let key = key.trim();
        arguments.insert(
            key.to_owned(),
            typed(value, &tool.parameters["properties"][key]),
        );
        rest = after;
    }
    Some((tool.name.clone(), Value::Object(arguments).to_string()))
}

/// A value as its schema has it: a text, or whatever JSON it is.
fn typed(value: &str, schema: &Value) -> Value {
    if schema["type"] == "string" {
        return Value::String(value.to_owned());
    }
    serde_json::from_str(value.trim()).unwrap_or_else(|_| Value::String(value.to_owned()))
}
