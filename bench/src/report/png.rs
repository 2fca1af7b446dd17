//! PNG files from SVG text, with a font of the program's own.

use anyhow::{Context, Result};
use resvg::tiny_skia::{Pixmap, Transform};
use resvg::usvg::fontdb::Database;
use resvg::usvg::{Options, Tree};
use std::sync::Arc;

/// Pixels for each unit of the SVG: sharp on screens with small pixels and in print.
const SCALE: f32 = 2.0;

/// The figure as a PNG.
pub(super) fn render(svg: &str) -> Result<Vec<u8>> {
    let mut fonts = Database::new();
    fonts.load_font_data(epaint_default_fonts::UBUNTU_LIGHT.to_vec());
    let family = fonts.faces().next().and_then(|face| face.families.first()).map(|(name, _)| name.clone());
    fonts.set_sans_serif_family(family.context("the built-in font has no name")?);
    let options = Options { fontdb: Arc::new(fonts), ..Options::default() };
    let tree = Tree::from_str(svg, &options).context("the figure is no SVG")?;
    let size = tree.size().to_int_size().scale_by(SCALE).context("the figure is too large")?;
    let mut pixels = Pixmap::new(size.width(), size.height()).context("the figure is empty")?;
    resvg::render(&tree, Transform::from_scale(SCALE, SCALE), &mut pixels.as_mut());
    pixels.encode_png().context("cannot encode a PNG")
}
