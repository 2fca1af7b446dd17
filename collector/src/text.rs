//! Text of other programs in messages of ours.

/// The most characters that are kept.
const MAX_CHARS: usize = 300;

/// The beginning of a text that another program wrote, on one line: what the log and the console show of it must not move a cursor or fill
/// a page.
pub(crate) fn one_line(text: &str) -> String {
    let line: String = text.chars().take(MAX_CHARS).map(|c| if c.is_control() { ' ' } else { c }).collect();
    line.trim().to_owned()
}
