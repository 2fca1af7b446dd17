//! A figure of one dial: what is gained by what it costs, a point for each setting.

use plotters::chart::{ChartBuilder, LabelAreaPosition};
use plotters::prelude::{IntoDrawingArea, SVGBackend, Text, WHITE};
use plotters::style::text_anchor::{HPos, Pos, VPos};

use super::axis::Scale;
use super::style::{INK, PALE, Series, drawn, text};
use anyhow::Result;

const SIZE: (u32, u32) = (640, 420);

/// One setting.
#[derive(Clone, Debug, PartialEq)]
pub struct FrontierPoint {
    /// The setting's name.
    pub name: String,
    /// What it costs: across.
    pub cost: f64,
    /// What is gained: up.
    pub gain: f64,
    /// Whether it is one of the dial's, joined by the line, or stands beside it.
    pub is_on_dial: bool,
}

/// Draws the points; the dial's are joined in their order.
///
/// # Errors
/// What the drawing library fails with.
pub fn frontier_svg(title: &str, across: &str, up: &str, points: &[FrontierPoint]) -> Result<String> {
    let mut svg = String::new();
    {
        let root = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        root.fill(&WHITE).map_err(drawn)?;
        root.draw(&Text::new(title.to_owned(), (16, 12), text(17))).map_err(drawn)?;
        let area = root.margin(38, 8, 0, 0);
        let costs = Scale::FromZero.fit(points.iter().map(|point| point.cost));
        let gains = Scale::FromZero.fit(points.iter().map(|point| point.gain));
        let ticks = (costs.len(), gains.len());
        let mut chart = ChartBuilder::on(&area)
            .margin(10)
            .margin_right(64)
            .set_label_area_size(LabelAreaPosition::Left, 62)
            .set_label_area_size(LabelAreaPosition::Bottom, 44)
            .build_cartesian_2d(costs, gains)
            .map_err(drawn)?;
        chart
            .configure_mesh()
            .light_line_style(PALE)
            .bold_line_style(PALE)
            .axis_style(INK)
            .x_labels(ticks.0)
            .y_labels(ticks.1)
            .x_desc(across)
            .y_desc(up)
            .label_style(text(13))
            .axis_desc_style(text(14))
            .draw()
            .map_err(drawn)?;
        let (left, top) = area.get_base_pixel();
        let pixel = |point: &FrontierPoint| {
            let (x, y) = chart.backend_coord(&(point.cost, point.gain));
            (x - left, y - top)
        };
        let (dial, beside) = (Series::new(0, 1, "", Vec::new()), Series::new(1, 2, "", Vec::new()));
        let on_dial: Vec<_> = points.iter().filter(|point| point.is_on_dial).map(pixel).collect();
        dial.draw_line(&area, &on_dial)?;
        for point in points {
            let (x, y) = pixel(point);
            if point.is_on_dial { &dial } else { &beside }.draw_marker(&area, (x, y))?;
            let style = text(13).pos(Pos::new(HPos::Left, VPos::Top));
            area.draw(&Text::new(point.name.clone(), (x + 8, y + 6), style)).map_err(drawn)?;
        }
        root.present().map_err(drawn)?;
    }
    Ok(svg)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_setting_is_named_and_the_dials_are_joined() {
        let point = |name: &str, cost, gain, is_on_dial| FrontierPoint { name: name.into(), cost, gain, is_on_dial };
        let points = [point("few", 10.0, 900.0, true), point("many", 20.0, 1_000.0, true), point("none", 5.0, 700.0, false)];
        let svg = frontier_svg("A dial", "s", "tok", &points).expect("a figure");
        assert!(["few", "many", "none", "A dial"].iter().all(|name| svg.contains(name)), "{svg}");
        assert_eq!(svg.matches("<circle").count(), 2);
    }
}
