//! Figures: a line for each label over the stages, named at its right end.

use super::axis::{Axis, Scale};
use super::cells::{Section, Summary};
use super::metric::Metric;
use super::style::{INK, PALE, Pixel, Series, drawn, text};
use anyhow::Result;
use plotters::chart::{ChartBuilder, LabelAreaPosition};
use plotters::coord::Shift;
use plotters::prelude::{DrawingArea, IntoDrawingArea, SVGBackend, Text, WHITE};
use plotters::style::text_anchor::{HPos, Pos, VPos};

/// Height of a figure.
const HEIGHT: u32 = 420;

/// Width of a panel without the names beside it.
const PANEL_WIDTH: u32 = 460;

/// Least distance between two names, and so between their middles and the edges.
const NAME_HEIGHT: i32 = 17;

/// About how wide a character of a name is.
const CHARACTER_WIDTH: u32 = 7;

/// Between the plot and the names: the lines that join them.
const NAME_GAP: i32 = 26;

/// Several panels side by side.
pub(super) struct Figure<'a> {
    /// Its name in those of files.
    pub(super) name: &'static str,
    title: &'static str,
    panels: Vec<(Metric, Scale)>,
    section: &'a Section,
}

/// What the panels draw on.
pub(super) type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl<'a> Figure<'a> {
    /// The figures of a section: those for which it has values.
    pub(super) fn all(section: &'a Section) -> Vec<Self> {
        let figure = |name, title, panels| Self { name, title, panels, section };
        let all = [
            figure("ttfb", "Time to the first token", vec![(Metric::TtfbP50, Scale::Log), (Metric::TtfbP95, Scale::Log)]),
            figure("busy", "Replicas busy", vec![(Metric::Busy, Scale::FromZero)]),
            figure("hits", "Prompt tokens from the prefix cache", vec![(Metric::Hits, Scale::Percent)]),
            figure("output", "Output", vec![(Metric::Output, Scale::FromZero)]),
        ];
        let has = |metric: &Metric| section.cells.iter().any(|cell| cell.summary(*metric).is_some());
        all.into_iter().filter(|figure| figure.panels.iter().any(|(metric, _)| has(metric))).collect()
    }

    /// The figure as SVG.
    pub(super) fn svg(&self) -> Result<String> {
        let names = self.section.labels.iter().map(|label| label.chars().count() as u32).max().unwrap_or_default();
        let names_width = names * CHARACTER_WIDTH + NAME_GAP as u32 + 24;
        let size = ((PANEL_WIDTH + names_width) * self.panels.len() as u32, HEIGHT);
        let mut svg = String::new();
        {
            let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
            root.fill(&WHITE).map_err(drawn)?;
            let title = format!("{} ({}, by {})", self.title, self.section.workload, self.section.unit());
            root.draw(&Text::new(title, (16, 12), text(17))).map_err(drawn)?;
            let below = root.margin(38, 8, 0, 0);
            for (area, (metric, scale)) in below.split_evenly((1, self.panels.len())).iter().zip(&self.panels) {
                self.panel(area, *metric, *scale, names_width)?;
            }
            root.present().map_err(drawn)?;
        }
        Ok(svg)
    }

    fn panel(&self, area: &Area<'_>, metric: Metric, scale: Scale, names_width: u32) -> Result<()> {
        let stages = &self.section.stages;
        let series = self.series(metric);
        let values = series.iter().flat_map(|series| &series.points).flat_map(|(_, summary)| [summary.least, summary.most]);
        let (across, up) = (Axis::columns(stages.iter().map(ToString::to_string)), scale.fit(values));
        let (columns, rows) = (across.len(), up.len());
        let mut chart = ChartBuilder::on(area)
            .margin(10)
            .margin_right(names_width)
            .set_label_area_size(LabelAreaPosition::Left, 62)
            .set_label_area_size(LabelAreaPosition::Bottom, 44)
            .build_cartesian_2d(across, up)
            .map_err(drawn)?;
        chart
            .configure_mesh()
            .disable_x_mesh()
            .light_line_style(PALE)
            .bold_line_style(PALE)
            .axis_style(INK)
            .x_labels(columns)
            .y_labels(rows)
            .x_desc(self.section.unit())
            .y_desc(metric.title())
            .label_style(text(13))
            .axis_desc_style(text(14))
            .draw()
            .map_err(drawn)?;

        let mut ends = Vec::new();
        for series in &series {
            let pixel = |stage: usize, value: f64| {
                let place = (stage as f64 + series.shift(), scale.place(value));
                relative(area, chart.backend_coord(&place))
            };
            for &(stage, Summary { least, most, .. }) in &series.points {
                series.draw_range(area, pixel(stage, least), pixel(stage, most))?;
            }
            let means: Vec<_> = series.points.iter().map(|(stage, summary)| pixel(*stage, summary.mean)).collect();
            series.draw_line(area, &means)?;
            means.iter().try_for_each(|mean| series.draw_marker(area, *mean))?;
            ends.extend(means.last().map(|end| (series, *end)));
        }
        let (width, _) = area.dim_in_pixel();
        names(area, ends, width as i32 - names_width as i32)
    }

    fn series(&self, metric: Metric) -> Vec<Series<'_>> {
        let labels = &self.section.labels;
        let points = |label: &str| {
            let cells = self.section.stages.iter().map(|stage| self.section.cell(label, *stage)).enumerate();
            cells.filter_map(|(stage, cell)| Some((stage, cell?.summary(metric)?))).collect::<Vec<_>>()
        };
        let series = labels.iter().enumerate().map(|(index, label)| Series::new(index, labels.len(), label, points(label)));
        series.filter(|series| !series.points.is_empty()).collect()
    }
}

/// Writes each line's name beside its end, right of `edge`, or as near as the others leave room.
fn names(area: &Area<'_>, mut ends: Vec<(&Series<'_>, Pixel)>, edge: i32) -> Result<()> {
    let (_, height) = area.dim_in_pixel();
    ends.sort_by_key(|(_, (_, y))| *y);
    let wanted: Vec<_> = ends.iter().map(|(_, (_, y))| *y).collect();
    for ((series, (x, y)), place) in ends.into_iter().zip(spread(&wanted, NAME_HEIGHT, height as i32 - 60)) {
        let name = edge + NAME_GAP;
        series.draw_join(area, vec![(x + 6, y), (edge.max(x + 6), y), (name - 8, place)])?;
        series.draw_marker(area, (name, place))?;
        let style = text(13).pos(Pos::new(HPos::Left, VPos::Center));
        area.draw(&Text::new(series.label.to_owned(), (name + 10, place), style)).map_err(drawn)?;
    }
    Ok(())
}

/// Places for things that want to be at `wanted` (rising), at least `least` apart and, if there is room, not beyond `end`.
fn spread(wanted: &[i32], least: i32, end: i32) -> Vec<i32> {
    let mut places = wanted.to_vec();
    for index in 1..places.len() {
        places[index] = places[index].max(places[index - 1] + least);
    }
    let mut limit = end;
    for place in places.iter_mut().rev() {
        *place = (*place).min(limit);
        limit = *place - least;
    }
    // Where that went beyond the beginning there is not room for all: they go on below the end.
    let above = places.first().map_or(0, |first| (least - first).max(0));
    places.into_iter().map(|place| place + above).collect()
}

/// A place on the whole figure as one in the area.
fn relative(area: &Area<'_>, (x, y): Pixel) -> Pixel {
    let (left, top) = area.get_base_pixel();
    (x - left, y - top)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn names_keep_their_order_and_their_distance(mut wanted in prop::collection::vec(0..400i32, 1..20)) {
            wanted.sort_unstable();
            let places = spread(&wanted, 17, 400);
            prop_assert!(places.windows(2).all(|pair| pair[1] - pair[0] >= 17), "{places:?}");
            prop_assert!(places[0] >= 17.min(wanted[0]) || places[0] >= 0);
        }
    }

    #[test]
    fn names_with_room_stay_where_they_are() {
        assert_eq!(spread(&[20, 40, 390], 17, 400), [20, 40, 390]);
        assert_eq!(spread(&[395, 398], 17, 400), [383, 400]);
    }
}
