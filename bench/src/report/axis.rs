//! Axes: where values are on them, and their ticks.

use plotters::coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter};
use plotters::coord::types::RangedCoordf64;
use std::ops::Range;

/// An axis with ticks at places of its own, each with its name.
#[derive(Clone, Debug)]
pub(super) struct Axis {
    range: Range<f64>,
    ticks: Vec<(f64, String)>,
}

/// How values are placed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Scale {
    /// From 0, evenly.
    FromZero,
    /// From 0 to 100, evenly.
    Percent,
    /// By their logarithm.
    Log,
}

/// On a logarithmic axis nothing is smaller: a hundredth of a millisecond.
const SMALLEST: f64 = 1e-5;

impl Scale {
    /// Where a value is on the axis.
    pub(super) fn place(self, value: f64) -> f64 {
        match self {
            Self::FromZero | Self::Percent => value,
            Self::Log => value.max(SMALLEST).log10(),
        }
    }

    /// What a place is called.
    fn label(self, at: f64) -> String {
        let value = if self == Self::Log { 10f64.powf(at) } else { at };
        // Ticks are 1, 2 or 5 times a power of ten: three digits after the first that counts are more than any has.
        let digits = (2.0 - value.abs().max(SMALLEST).log10().floor()).clamp(0.0, 7.0) as usize;
        let text = format!("{value:.digits$}");
        let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
        grouped(text)
    }

    /// An axis that has all values.
    pub(super) fn fit(self, values: impl Iterator<Item = f64>) -> Axis {
        let (least, most) =
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), value| (least.min(value), most.max(value)));
        let (least, most) = if least.is_finite() { (least, most) } else { (0.0, 1.0) };
        let (range, ticks): (_, Vec<_>) = match self {
            Self::Percent => (0.0..102.0, (0..=5).map(|tick| f64::from(tick) * 20.0).collect()),
            Self::FromZero => {
                let end = if most > 0.0 { most * 1.05 } else { 1.0 };
                let step = step(end / 5.0);
                (0.0..end, (0..).map(|tick| f64::from(tick) * step).take_while(|tick| *tick < end).collect())
            }
            Self::Log => {
                let range = self.place(least) - 0.08..self.place(most) + 0.08;
                let powers = range.start.floor() as i32..=range.end.ceil() as i32;
                let all = powers.flat_map(|power| [1.0, 2.0, 5.0].map(|digit| self.place(digit * 10f64.powi(power))));
                let ticks = all.filter(|at| range.contains(at)).collect();
                (range, ticks)
            }
        };
        Axis { range, ticks: ticks.into_iter().map(|at| (at, self.label(at))).collect() }
    }
}

impl Axis {
    /// An axis of columns, one apart.
    pub(super) fn columns(names: impl Iterator<Item = String>) -> Self {
        let ticks: Vec<_> = names.enumerate().map(|(index, name)| (index as f64, name)).collect();
        Self { range: -0.4..ticks.len() as f64 - 0.6, ticks }
    }

    /// Its number of ticks.
    pub(super) fn len(&self) -> usize {
        self.ticks.len()
    }
}

impl Ranged for Axis {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        RangedCoordf64::from(self.range.clone()).map(value, limit)
    }

    fn key_points<Hint: KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.ticks.iter().map(|(at, _)| *at).collect()
    }

    fn range(&self) -> Range<f64> {
        self.range.clone()
    }
}

impl ValueFormatter<f64> for Axis {
    fn format(value: &f64) -> String {
        value.to_string()
    }

    fn format_ext(&self, value: &f64) -> String {
        self.ticks.iter().find(|(at, _)| at == value).map_or_else(|| Self::format(value), |(_, name)| name.clone())
    }
}

/// The smallest of 1, 2 and 5 times a power of ten that is not below `least`.
fn step(least: f64) -> f64 {
    let power = 10f64.powf(least.log10().floor());
    [1.0, 2.0, 5.0].map(|digit| digit * power).into_iter().find(|step| *step >= least * 0.999).unwrap_or(10.0 * power)
}

/// A number with a space between thousands.
fn grouped(text: &str) -> String {
    let whole = text.split('.').next().unwrap_or_default().len();
    let mut out = String::new();
    for (index, char) in text.chars().enumerate() {
        if index > 0 && index < whole && (whole - index).is_multiple_of(3) {
            out.push('\u{2009}');
        }
        out.push(char);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn labels(scale: Scale, values: &[f64]) -> Vec<String> {
        scale.fit(values.iter().copied()).ticks.into_iter().map(|(_, name)| name).collect()
    }

    #[test]
    fn ticks_are_round_numbers() {
        assert_eq!(labels(Scale::Log, &[0.19, 7.2]), ["0.2", "0.5", "1", "2", "5"]);
        assert_eq!(labels(Scale::FromZero, &[3.9, 1.0]), ["0", "1", "2", "3", "4"]);
        assert_eq!(labels(Scale::FromZero, &[13_195.0]), ["0", "5\u{2009}000", "10\u{2009}000"]);
        assert_eq!(labels(Scale::Percent, &[1.0]), ["0", "20", "40", "60", "80", "100"]);
    }

    proptest! {
        #[test]
        fn every_value_is_on_its_axis(values in prop::collection::vec(0.0..1e6f64, 0..10)) {
            for scale in [Scale::FromZero, Scale::Log] {
                let Axis { range, ticks } = scale.fit(values.iter().copied());
                prop_assert!(values.iter().all(|value| range.contains(&scale.place(*value))), "{range:?} {values:?}");
                prop_assert!(ticks.iter().all(|tick| range.contains(&tick.0)));
                prop_assert!(ticks.len() < 50);
            }
        }
    }
}
