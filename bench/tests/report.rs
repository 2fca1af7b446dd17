//! The report on several runs, made from one real result and others like it.

use homing_bench::load::LoadReport;
use homing_bench::report;
use resvg::tiny_skia::Pixmap;
use resvg::usvg::{Options, Tree};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const EXAMPLE: &str = include_str!("../testdata/load.json");

fn run(label: &str, sessions: usize, round: u32, hits: f64) -> LoadReport {
    let example: LoadReport = serde_json::from_str(EXAMPLE).unwrap();
    LoadReport { label: label.to_owned(), sessions, round, prefix_hits: Some(hits), ttfb_p50_s: Some(hits / 100.0), ..example }
}

/// Two labels at three stages, two rounds each, and one run of an open loop.
fn runs() -> Vec<LoadReport> {
    let mut runs = Vec::new();
    for (label, hits) in [("least <request>", 50.0), ("homing", 80.0)] {
        for sessions in [16, 4, 8] {
            runs.extend([0, 1].map(|round| run(label, sessions, round, hits + 2.0 * f64::from(round))));
        }
    }
    runs.push(LoadReport { rate: Some(12.0), workload: "open".to_owned(), ..run("homing", 0, 0, 77.0) });
    runs
}

fn with_extension<'a>(files: &'a [PathBuf], extension: &'a str) -> Vec<&'a Path> {
    files.iter().map(PathBuf::as_path).filter(|path| path.extension().is_some_and(|found| found == extension)).collect()
}

/// The texts of a table's cells, row by row.
fn rows(page: &str) -> Vec<Vec<String>> {
    let cells = |row: &str| {
        let cells = row.split("<td").skip(1).map(|cell| &cell[cell.find('>').unwrap() + 1..cell.find("</td>").unwrap()]);
        cells.map(|cell| cell.replace("<small>", " ").replace("</small>", "")).collect::<Vec<_>>()
    };
    page.split("<tr").skip(1).map(cells).filter(|row| !row.is_empty()).collect()
}

#[test]
fn the_table_has_a_row_for_every_label_and_stage_in_order() {
    let out = tempfile::tempdir().unwrap();
    let files = report::write(&runs(), "A title & more", out.path()).unwrap();
    let page = fs::read_to_string(&files[0]).unwrap();
    assert!(page.contains("<h1>A title &#38; more</h1>") || page.contains("<h1>A title &amp; more</h1>"), "escaped");
    let rows = rows(&page);
    let keys: Vec<_> = rows.iter().map(|row| (row[0].as_str(), row[1].as_str(), row[2].as_str())).collect();
    let least = "least &#60;request&#62;";
    let expected = [
        ("4", least, "2"),
        ("", "homing", "2"),
        ("8", least, "2"),
        ("", "homing", "2"),
        ("16", least, "2"),
        ("", "homing", "2"),
        ("12", "homing", "1"),
    ];
    assert_eq!(keys, expected);
    // Stage, label and rounds, then the metrics in their order: hits are the sixth.
    assert_eq!(rows[0][3 + 5], "51.0 50.0–52.0", "the mean, and the range below it");
    assert_eq!(rows[6][3 + 5], "77.0", "one round has no range");
}

#[test]
fn the_page_needs_no_other_file() {
    let out = tempfile::tempdir().unwrap();
    let page = fs::read_to_string(&report::write(&runs(), "t", out.path()).unwrap()[0]).unwrap();
    assert_eq!(page.matches("<svg").count(), 8, "four figures a section");
    assert!(!page.contains("src=") && !page.contains("href="));
}

#[test]
fn figures_are_svg_and_png_of_the_same_shape_with_every_name_in_them() {
    let out = tempfile::tempdir().unwrap();
    let files = report::write(&runs(), "t", out.path()).unwrap();
    let (svgs, pngs) = (with_extension(&files, "svg"), with_extension(&files, "png"));
    assert_eq!((svgs.len(), pngs.len()), (8, 8));
    for (svg, png) in svgs.iter().zip(&pngs) {
        let text = fs::read_to_string(svg).unwrap();
        let size = Tree::from_str(&text, &Options::default()).unwrap().size();
        assert!(text.contains("homing") && text.contains("sessions"), "{}", svg.display());
        let pixels = Pixmap::decode_png(&fs::read(png).unwrap()).unwrap();
        assert_eq!((pixels.width(), pixels.height()), (size.width() as u32 * 2, size.height() as u32 * 2));
    }
}

#[test]
fn text_is_drawn_on_a_machine_without_fonts() {
    let out = tempfile::tempdir().unwrap();
    let files = report::write(&runs(), "t", out.path()).unwrap();
    let pixels = Pixmap::decode_png(&fs::read(with_extension(&files, "png")[0]).unwrap()).unwrap();
    // The title's place, where nothing else is. The program loads no font of the machine's, so this is its own.
    let title = (0..60).flat_map(|y| (0..600).map(move |x| (x, y)));
    let dark = title.filter(|(x, y)| pixels.pixel(*x, *y).is_some_and(|pixel| pixel.red() < 128)).count();
    assert!(dark > 300, "{dark} dark pixels");
}

#[test]
fn a_figure_that_no_run_has_is_left_out() {
    let out = tempfile::tempdir().unwrap();
    let runs: Vec<_> = runs().into_iter().map(|run| LoadReport { replicas_busy: None, ..run }).collect();
    let files = report::write(&runs, "t", out.path()).unwrap();
    assert!(files.iter().all(|path| !path.to_string_lossy().contains("busy")));
    assert!(rows(&fs::read_to_string(&files[0]).unwrap()).iter().all(|row| row[3 + 4] == "–"));
}

#[test]
fn the_command_reads_objects_lines_and_lists_and_names_runs_by_their_file() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let unnamed = LoadReport { label: String::new(), ..run("", 4, 0, 60.0) };
    fs::write(path("one.json"), serde_json::to_string_pretty(&unnamed).unwrap()).unwrap();
    fs::write(path("list.json"), serde_json::to_string(&[run("a", 4, 0, 70.0), run("b", 4, 0, 70.0)]).unwrap()).unwrap();
    let lines = [run("c", 4, 0, 70.0), run("d", 4, 0, 70.0)].map(|run| serde_json::to_string(&run).unwrap() + "\n");
    fs::write(path("lines.json"), lines.concat()).unwrap();
    let command = || Command::new(env!("CARGO_BIN_EXE_homing-bench"));
    let files = ["one.json", "list.json", "lines.json"].map(path);
    let output = command().arg("report").args(files).arg("--out").arg(path("new/report")).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let written = String::from_utf8(output.stdout).unwrap();
    assert!(written.lines().count() == 9 && written.lines().all(|line| Path::new(line).exists()), "{written}");
    let page = fs::read_to_string(written.lines().next().unwrap()).unwrap();
    assert_eq!(rows(&page).iter().map(|row| row[1].as_str()).collect::<Vec<_>>(), ["one", "a", "b", "c", "d"]);
}

#[test]
fn a_file_that_is_no_result_is_named() {
    let directory = tempfile::tempdir().unwrap();
    for (name, text) in [("empty.json", ""), ("other.json", "{\"a\":1}"), ("text.json", "no")] {
        let path = directory.path().join(name);
        fs::write(&path, text).unwrap();
        let command =
            Command::new(env!("CARGO_BIN_EXE_homing-bench")).arg("report").arg(&path).arg("--out").arg(directory.path()).output();
        let output = command.unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && error.contains(name) && error.contains("load --json"), "{error}");
    }
}
