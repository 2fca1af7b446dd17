//! The model a request body asks for.

use super::json::{object, string};

/// The longest name of a model that is made a header, in bytes.
pub const MAX_MODEL_BYTES: usize = 256;

/// The model that a JSON request body names, if it can stand in a header: visible ASCII, at most [`MAX_MODEL_BYTES`].
///
/// `None` too if the body is no JSON object, or names a model twice: parsers differ over which one counts.
pub fn model(body: &[u8]) -> Option<String> {
    let [model] = object(body, &["model"])?;
    let name = string(model.get()?)?;
    let is_header = (1..=MAX_MODEL_BYTES).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic());
    is_header.then(|| name.into_owned())
}

#[cfg(test)]
mod tests {
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_is_the_top_level_field_wherever_it_stands() {
        for body in [
            r#"{"model":"qwen3-4b","messages":[]}"#,
            r#"{"messages":[{"role":"user","content":"{\"model\":\"other\"}"}],"model":"qwen3-4b"}"#,
            r#" { "metadata" : {"model":"other"} , "mod\u0065l" : "qwen3-4b" } "#,
        ] {
            assert_eq!(model(body.as_bytes()).as_deref(), Some("qwen3-4b"), "{body}");
        }
        assert_eq!(model(br#"{"model":"org\/name:tag@1"}"#).as_deref(), Some("org/name:tag@1"));
    }

    #[test]
    fn what_cannot_stand_in_a_header_or_is_not_certain_is_none() {
        let long = format!(r#"{{"model":"{}"}}"#, "m".repeat(MAX_MODEL_BYTES + 1));
        for body in [
            "",
            "[]",
            r#""qwen3-4b""#,
            r#"{"model":7}"#,
            r#"{"model":null}"#,
            r#"{"model":""}"#,
            r#"{"model":"a b"}"#,
            r#"{"model":"a\r\nx-homing-targets: 1.2.3.4:5"}"#,
            r#"{"model":"größe"}"#,
            r#"{"model":"a","model":"b"}"#,
            r#"{"model":"a""#,
            &long,
        ] {
            assert_eq!(model(body.as_bytes()), None, "{body}");
        }
    }

    proptest! {
        #[test]
        fn any_body_names_the_model_that_serde_json_reads_or_none(body in mutated(seeds("bodies"))) {
            if let Some(model) = model(&body) {
                prop_assert!((1..=MAX_MODEL_BYTES).contains(&model.len()) && model.bytes().all(|byte| byte.is_ascii_graphic()));
                // What serde_json refuses and the scanner takes are bytes inside other strings.
                if let Ok(serde_json::Value::Object(fields)) = serde_json::from_slice(&body) {
                    prop_assert_eq!(fields.get("model").and_then(serde_json::Value::as_str), Some(model.as_str()));
                }
            }
        }

        #[test]
        fn a_name_is_always_fit_for_a_header(body: Vec<u8>, name: String) {
            let named = serde_json::to_vec(&serde_json::json!({ "model": name })).expect("JSON");
            for model in [model(&body), model(&named)].into_iter().flatten() {
                prop_assert!(model.bytes().all(|byte| byte.is_ascii_graphic()));
            }
        }
    }
}
