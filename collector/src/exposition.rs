//! The Prometheus text exposition format, read from bytes.
//!
//! Format: <https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format>. One sample a line:
//! `name{label="value",...} value [timestamp]`, where a label value escapes `\\`, `\"` and `\n`; every line ends with a line feed.
//!
//! Homing needs a dozen of some six hundred samples, every 250 ms and from every replica. So this reader allocates nothing for the
//! rest: it yields a sample's name first and splits its labels only when asked. It never fails: a line it cannot read yields
//! nothing, since one strange series must not hide the others.

use std::borrow::Cow;

/// Longer lines are skipped.
pub const MAX_LINE_BYTES: usize = 64 << 10;

/// One sample line, not yet split into its labels.
#[derive(Clone, Copy, Debug)]
pub struct Sample<'a> {
    /// The metric's name.
    pub name: &'a [u8],
    /// What follows the name.
    rest: &'a [u8],
}

/// A sample's labels and value.
#[derive(Clone, Debug, PartialEq)]
pub struct Parts<'a> {
    /// The labels in the order of the line, names and unescaped values.
    pub labels: Vec<(&'a [u8], Cow<'a, [u8]>)>,
    /// The value; may be NaN or infinite.
    pub value: f64,
}

/// The samples of `text`, in its order.
///
/// Comments and blank lines are skipped, and so is a last line without a line feed: its value may have been cut.
pub fn samples(text: &[u8]) -> impl Iterator<Item = Sample<'_>> {
    let mut start = 0;
    memchr::memchr_iter(b'\n', text).filter_map(move |end| {
        let line = &text[start..end];
        start = end + 1;
        Sample::new(line)
    })
}

impl<'a> Sample<'a> {
    fn new(line: &'a [u8]) -> Option<Self> {
        if line.len() > MAX_LINE_BYTES {
            return None;
        }
        let line = line.trim_ascii_start();
        let end = memchr::memchr3(b'{', b' ', b'\t', line)?;
        let (name, rest) = line.split_at(end);
        (!name.is_empty() && name[0] != b'#').then_some(Self { name, rest })
    }

    /// Splits the labels and reads the value; `None` when the line breaks the format.
    pub fn parts(&self) -> Option<Parts<'a>> {
        let mut labels = Vec::new();
        let mut rest = self.rest.trim_ascii_start();
        if let Some(inside) = rest.strip_prefix(b"{") {
            rest = inside.trim_ascii_start();
            while rest.first()? != &b'}' {
                let (label, after) = label(rest)?;
                labels.push(label);
                rest = after.trim_ascii_start();
                match rest.first()? {
                    b',' => rest = rest[1..].trim_ascii_start(),
                    b'}' => {}
                    _ => return None,
                }
            }
            rest = &rest[1..];
        }
        // A timestamp may follow the value; replicas send none and Homing has its own clock.
        let value = rest.split(u8::is_ascii_whitespace).find(|word| !word.is_empty())?;
        let value = std::str::from_utf8(value).ok()?.parse().ok()?;
        Some(Parts { labels, value })
    }
}

impl Parts<'_> {
    /// The value of the label `name`, if the sample has it.
    pub fn label(&self, name: &[u8]) -> Option<&[u8]> {
        self.labels.iter().find(|(label, _)| *label == name).map(|(_, value)| value.as_ref())
    }
}

/// Reads `name="value"` at the start of `text` and returns what follows it.
#[expect(clippy::type_complexity, reason = "a label and the rest, used once")]
fn label(text: &[u8]) -> Option<((&[u8], Cow<'_, [u8]>), &[u8])> {
    let equals = memchr::memchr(b'=', text)?;
    let name = text[..equals].trim_ascii();
    let quoted = text[equals + 1..].trim_ascii_start().strip_prefix(b"\"")?;
    let mut end = memchr::memchr2(b'"', b'\\', quoted)?;
    if quoted[end] == b'"' {
        return Some(((name, Cow::Borrowed(&quoted[..end])), &quoted[end + 1..]));
    }
    let mut value = quoted[..end].to_vec();
    loop {
        match quoted.get(end)? {
            b'"' => return Some(((name, Cow::Owned(value)), &quoted[end + 1..])),
            b'\\' => {
                match quoted.get(end + 1)? {
                    b'n' => value.push(b'\n'),
                    escaped @ (b'\\' | b'"') => value.push(*escaped),
                    // Not an escape of the format: both bytes stand for themselves.
                    other => value.extend([b'\\', *other]),
                }
                end += 2;
            }
            byte => {
                value.push(*byte);
                end += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    fn only(line: &str) -> Option<Parts<'_>> {
        samples(line.as_bytes()).next()?.parts()
    }

    fn labels<'a>(parts: &'a Parts<'a>) -> Vec<(&'a str, &'a str)> {
        let text = |bytes| std::str::from_utf8(bytes).expect("UTF-8");
        parts.labels.iter().map(|(name, value)| (text(name), text(value.as_ref()))).collect()
    }

    #[test]
    fn label_values_may_hold_commas_braces_and_escapes() {
        let line = "m{a=\"x,y}\",b=\"say \\\"hi\\\"\",c=\"back\\\\slash\",d=\"two\\nlines\",e=\"\\d\"} 4\n";
        let parts = only(line).expect("a sample");
        let expected = [("a", "x,y}"), ("b", "say \"hi\""), ("c", "back\\slash"), ("d", "two\nlines"), ("e", "\\d")];
        assert_eq!(labels(&parts), expected);
        assert_eq!(parts.value, 4.0);
    }

    #[test]
    fn spaces_a_trailing_comma_and_a_timestamp_are_allowed() {
        let parts = only("  m { a = \"1\" , b=\"2\", }  -7.5e1 1700000000000\r\n").expect("a sample");
        assert_eq!(labels(&parts), [("a", "1"), ("b", "2")]);
        assert_eq!(parts.value, -75.0);
    }

    #[test]
    fn numbers_that_are_none_and_infinite_ones_are_values() {
        assert!(only("m NaN\n").expect("a sample").value.is_nan());
        assert_eq!(only("m{} +Inf\n").expect("a sample").value, f64::INFINITY);
        assert_eq!(only("m -Inf\n").expect("a sample").value, f64::NEG_INFINITY);
    }

    #[test]
    fn comments_and_blank_lines_are_no_samples() {
        assert_eq!(samples(b"# HELP m 1\n\n   \n#m 1\nm 1\n").count(), 1);
    }

    #[test]
    fn a_last_line_without_a_line_feed_is_left_out_since_its_value_may_be_cut() {
        assert_eq!(samples(b"a 1\nb 23").map(|sample| sample.name).collect::<Vec<_>>(), [b"a"]);
    }

    #[test]
    fn a_broken_line_yields_nothing_and_hides_no_other() {
        for broken in ["m{a=\"1\n", "m{a=1} 2\n", "m{a=\"1\" b=\"2\"} 3\n", "m{a=\"1\"}\n", "m x\n", "m{a=\"\\\n", "m{\n", "m \n"] {
            let text = format!("{broken}good 1\n");
            let read: Vec<_> =
                samples(text.as_bytes()).filter(|sample| sample.parts().is_some()).map(|sample| sample.name).collect();
            assert_eq!(read, [b"good"], "{broken:?}");
        }
    }

    #[test]
    fn a_line_above_the_limit_is_skipped() {
        let text = format!("m{{a=\"{}\"}} 1\ngood 1\n", "x".repeat(MAX_LINE_BYTES));
        assert_eq!(samples(text.as_bytes()).count(), 1);
    }

    fn escape(value: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        for &byte in value {
            match byte {
                b'\n' => out.extend(b"\\n"),
                b'"' | b'\\' => out.extend([b'\\', byte]),
                _ => out.push(byte),
            }
        }
        out
    }

    proptest! {
        #[test]
        fn any_text_hides_no_line_behind_it(text in mutated(seeds("metrics"))) {
            let text = [&text[..], b"\ngood{a=\"b\"} 1\n"].concat();
            let read: Vec<_> = samples(&text).filter_map(|sample| Some((sample.name, sample.parts()?))).collect();
            let (name, parts) = read.last().expect("the line behind it");
            prop_assert_eq!((*name, parts.value, parts.label(b"a")), (&b"good"[..], 1.0, Some(&b"b"[..])));
            let lengths = read.iter().flat_map(|(name, parts)| {
                parts.labels.iter().map(|(label, value)| label.len() + value.len()).chain([name.len()])
            });
            prop_assert!(lengths.sum::<usize>() <= text.len());
        }

        #[test]
        fn any_text_that_looks_like_samples_is_read_without_a_panic(text in "(m[{ ]?[a=\"\\\\,}{ n0\n]{0,30}\n){0,8}") {
            for sample in samples(text.as_bytes()) {
                let _ = sample.parts();
            }
        }

        #[test]
        fn a_written_sample_reads_back(
            values in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..20), 0..6),
            value in any::<f64>().prop_filter("NaN differs from itself", |value| !value.is_nan()),
        ) {
            let mut line = b"vllm:m{".to_vec();
            for (index, label) in values.iter().enumerate() {
                line.extend(format!("l{index}=\"").into_bytes());
                line.extend(escape(label));
                line.extend(b"\",");
            }
            line.extend(format!("}} {value}\n").into_bytes());
            let parts = samples(&line).next().and_then(|sample| sample.parts()).expect("a sample");
            prop_assert_eq!(parts.value, value);
            prop_assert_eq!(parts.labels.len(), values.len());
            for (index, label) in values.iter().enumerate() {
                prop_assert_eq!(parts.label(format!("l{index}").as_bytes()), Some(label.as_slice()));
            }
        }
    }
}
