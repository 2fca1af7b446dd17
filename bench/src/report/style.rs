//! How lines look: colours that colour-blind eyes tell apart, and a marker and a dash for when colour does not.

use super::cells::Summary;
use super::figure::Area;
use anyhow::{Result, anyhow};
use plotters::element::DashedPathElement;
use plotters::prelude::{Circle, PathElement, Polygon, RGBColor, Rectangle};
use plotters::style::{Color, IntoFont, ShapeStyle, TextStyle};

/// Text and axes.
pub(super) const INK: RGBColor = RGBColor(0x33, 0x33, 0x33);

/// Lines across the plot.
pub(super) const PALE: RGBColor = RGBColor(0xe2, 0xe2, 0xe2);

/// Okabe and Ito's colours without the yellow, which white swallows: <https://jfly.uni-koeln.de/color/>.
const COLORS: [RGBColor; 7] = [
    RGBColor(0x00, 0x72, 0xb2),
    RGBColor(0xd5, 0x5e, 0x00),
    RGBColor(0x00, 0x9e, 0x73),
    RGBColor(0xcc, 0x79, 0xa7),
    RGBColor(0xe6, 0x9f, 0x00),
    RGBColor(0x56, 0xb4, 0xe9),
    RGBColor(0x00, 0x00, 0x00),
];

/// How far the lines of one stage may be apart sideways, so that their bars do not hide one another; stages are 1 apart.
const SPREAD: f64 = 0.24;

/// A place in an area.
pub(super) type Pixel = (i32, i32);

/// One label's line.
pub(super) struct Series<'a> {
    index: usize,
    count: usize,
    pub(super) label: &'a str,
    /// Stages, by their number, and the values there.
    pub(super) points: Vec<(usize, Summary)>,
}

impl<'a> Series<'a> {
    pub(super) fn new(index: usize, count: usize, label: &'a str, points: Vec<(usize, Summary)>) -> Self {
        Self { index, count, label, points }
    }

    fn color(&self) -> RGBColor {
        COLORS[self.index % COLORS.len()]
    }

    /// How far right of its stage it is drawn.
    pub(super) fn shift(&self) -> f64 {
        let step = (SPREAD / self.count as f64).min(0.05);
        (self.index as f64 - (self.count - 1) as f64 / 2.0) * step
    }

    fn stroke(&self) -> ShapeStyle {
        self.color().stroke_width(2)
    }

    /// The line through its points, dashed once the colours are used up.
    pub(super) fn draw_line(&self, area: &Area<'_>, points: &[Pixel]) -> Result<()> {
        let points = points.to_vec();
        if self.index < COLORS.len() {
            area.draw(&PathElement::new(points, self.stroke())).map_err(drawn)
        } else {
            area.draw(&DashedPathElement::new(points, 7, 5, self.stroke())).map_err(drawn)
        }
    }

    /// A bar over the range of a point.
    pub(super) fn draw_range(&self, area: &Area<'_>, least: Pixel, most: Pixel) -> Result<()> {
        area.draw(&PathElement::new([least, most], self.color().mix(0.55).stroke_width(4))).map_err(drawn)
    }

    /// What joins the line's end with its name.
    pub(super) fn draw_join(&self, area: &Area<'_>, path: Vec<Pixel>) -> Result<()> {
        area.draw(&PathElement::new(path, self.color().mix(0.45).stroke_width(1))).map_err(drawn)
    }

    /// The point itself: a circle, a square, a triangle or a diamond.
    pub(super) fn draw_marker(&self, area: &Area<'_>, (x, y): Pixel) -> Result<()> {
        let style = self.color().filled();
        match self.index % 4 {
            0 => area.draw(&Circle::new((x, y), 4, style)),
            1 => area.draw(&Rectangle::new([(x - 4, y - 4), (x + 4, y + 4)], style)),
            2 => area.draw(&Polygon::new([(x - 5, y + 4), (x + 5, y + 4), (x, y - 5)], style)),
            _ => area.draw(&Polygon::new([(x - 6, y), (x, y - 6), (x + 6, y), (x, y + 6)], style)),
        }
        .map_err(drawn)
    }
}

/// The program's text: in SVG the reader's font without serifs, in PNG the built-in one.
pub(super) fn text(size: i32) -> TextStyle<'static> {
    ("sans-serif", size).into_font().color(&INK)
}

/// What drawing can fail with, which names no cause that could be kept.
pub(super) fn drawn(error: impl std::error::Error) -> anyhow::Error {
    anyhow!("{error}")
}
