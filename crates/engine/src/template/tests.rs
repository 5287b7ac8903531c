use super::*;

fn template(source: &str) -> Result<ChatTemplate, TemplateError> {
    ChatTemplate::from_source(source, "<s>", "</s>")
}

fn render(source: &str) -> Result<String, TemplateError> {
    template(source)?.render(&ChatRequest::new(&[message("user", "hi")]))
}

#[test]
fn errors_name_the_line_and_the_way_out() {
    let error = render("{{ bos_token }}\n\n{{ messages[0].content | nonsense }}\n")
        .expect_err("unknown filter");
    let text = error.to_string();
    assert!(
        ["line 3", "nonsense", "--raw"]
            .iter()
            .all(|word| text.contains(word)),
        "{text}"
    );

    let error = render("a\n{{ messages[0].content.nonsense.more }}").expect_err("undefined");
    assert!(
        matches!(&error, TemplateError::Render { place, .. } if place.line == Some(2)),
        "{error:?}"
    );
    assert!(
        error
            .to_string()
            .contains("messages[0].content.nonsense.more"),
        "{error}"
    );

    let error = template("x\n{% if %}").expect_err("syntax");
    assert!(
        matches!(&error, TemplateError::Syntax { place, .. } if place.line == Some(2)),
        "{error:?}"
    );
    assert!(error.to_string().contains("--raw"), "{error}");
}

#[test]
fn a_refusal_is_in_the_templates_words() {
    let source = "{% macro check(m) %}{{ raise_exception('no ' + m.role + ' here') }}{% endmacro %}{{ check(messages[0]) }}";
    let error = render(source).expect_err("refused");
    assert!(
        matches!(&error, TemplateError::Refused { message } if message == "no user here"),
        "{error:?}"
    );
}

#[test]
fn hostile_templates_end() {
    let doubling = "{% set ns = namespace(s='0123456789abcdef') %}".to_owned()
        + &"{% set ns.s = ns.s ~ ns.s %}".repeat(40)
        + "{{ ns.s }}";
    let endless = [
        "{% for a in range(100000) %}{% for b in range(100000) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        &doubling,
    ];
    let start = std::time::Instant::now();
    for source in endless {
        let error = render(source).expect_err("it does not end");
        assert!(error.to_string().contains("--raw"), "{error}");
    }
    assert!(render("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}").is_err());
    assert!(template(&"{% if true %}".repeat(50_000)).is_err());
    assert!(
        template(&format!(
            "{{{{ {}1{} }}}}",
            "(".repeat(50_000),
            ")".repeat(50_000)
        ))
        .is_err()
    );
    assert!(matches!(
        template(&"x".repeat(2 << 20)),
        Err(TemplateError::TooLong { .. })
    ));
    assert!(start.elapsed().as_secs() < 20, "{:?}", start.elapsed());
}

#[test]
fn long_conversations_fit() {
    let template =
        template(include_str!("../../tests/data/templates/llama3.jinja")).expect("reads");
    let messages: Vec<Json> = (0..20_000)
        .map(|i| message(["user", "assistant"][i % 2], "word "))
        .collect();
    assert!(template.render(&ChatRequest::new(&messages)).is_ok());
    let long = [message("user", &"word ".repeat(1 << 20))];
    assert!(
        template
            .render(&ChatRequest::new(&long))
            .expect("renders")
            .len()
            > 5 << 20
    );
}

#[test]
fn messages_need_a_role() {
    let template = template("x").expect("reads");
    let messages = [message("user", "a"), json!({"content": "b"})];
    let error = template
        .render(&ChatRequest::new(&messages))
        .expect_err("no role");
    assert!(matches!(error, TemplateError::Message { index: 1 }));
    assert!(matches!(
        template.render(&ChatRequest::new(&[json!("a")])),
        Err(TemplateError::Message { index: 0 })
    ));
}

#[test]
fn generation_tags_trim_like_conditions() {
    assert_eq!(
        without_generation_tags("{% if x %}a{% endif %}"),
        "{% if x %}a{% endif %}"
    );
    assert_eq!(
        without_generation_tags("{%- generation -%}\na{% endgeneration %}{%+endgeneration%}"),
        "{%-  if true  -%}\na{%  endif  %}{%+ endif %}"
    );
    assert_eq!(without_generation_tags("{% generation"), "{% generation");
    assert_eq!(without_generation_tags("{%-%}{% %}日{%"), "{%-%}{% %}日{%");
    assert_eq!(
        render("a\n  {%- generation %}\nb\n{%- endgeneration %}\nc").expect("renders"),
        "ab\nc".replace("b\n", "b")
    );
}

#[test]
fn the_templates_for_tools_is_taken_with_tools() {
    let template = ChatTemplate::build("plain", Some("{{ tools | length }} tools"), Vec::new())
        .expect("reads");
    let messages = [message("user", "hi")];
    let mut request = ChatRequest::new(&messages);
    assert_eq!(template.render(&request).expect("renders"), "plain");
    let tools = [json!({"type": "function"})];
    request.tools = &tools;
    assert_eq!(template.render(&request).expect("renders"), "1 tools");
}

#[test]
fn variables_cannot_replace_the_messages() {
    let template =
        template("{{ enable_thinking }} {{ messages | length }} {{ bos_token }}").expect("reads");
    let messages = [message("user", "hi")];
    let mut request = ChatRequest::new(&messages);
    request.variables = json!({"enable_thinking": false, "messages": [], "bos_token": "x"})
        .as_object()
        .expect("one")
        .clone();
    assert_eq!(template.render(&request).expect("renders"), "False 1 <s>");
}

#[test]
fn methods_by_hand() {
    let cases = [
        ("{{ 'a  b c '.rsplit() }}", "['a', 'b', 'c']"),
        ("{{ 'a b  c'.rsplit(none, 1) }}", "['a b', 'c']"),
        ("{{ 'a,b,c'.rsplit(',', 0) }}", "['a,b,c']"),
        ("{{ 'abc'.partition('x') }}", "['abc', '', '']"),
        ("{{ 'abc'.rpartition('x') }}", "['', '', 'abc']"),
        ("{{ 'x\\n\\'y\\\"'.strip() | tojson }}", r#""x\n'y\"""#),
        ("{{ ['a\\'\"\\n\\\\'] }}", r#"['a\'"\n\\']"#),
        ("{{ {'k': undefined_thing is defined} }}", "{'k': False}"),
        (
            "{{ {'a': 1}.items() | list | length }}{{ {'a': 1}.get('b', 'c') }}",
            "1c",
        ),
        (
            "{{ 'ß'.upper() }}{{ ' x '.strip() }}{{ 'a-b'.split('-')[1] }}{{ 'x'.title() }}",
            "SSxbX",
        ),
    ];
    for (source, expected) in cases {
        assert_eq!(
            render(source).unwrap_or_else(|e| panic!("{source}: {e}")),
            expected,
            "{source}"
        );
    }
    assert!(render("{{ 'a'.rsplit('') }}").is_err());
    assert!(
        render("{{ 'a'.no_such_method() }}")
            .expect_err("unknown")
            .to_string()
            .contains("no_such_method")
    );
}
