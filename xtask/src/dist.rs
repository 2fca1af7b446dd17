//! `cargo xtask dist`: what is shipped, in `target/dist`.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use flate2::{Compression, GzBuilder};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::tools::{self, cargo, run, say};

const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+gzip";
const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
const INDEX: &str = "application/vnd.oci.image.index.v1+json";

/// Builds the module, the binaries and an OCI image that holds the module, and says how large each is and its SHA-256.
///
/// # Errors
/// If something cannot be built or written.
pub fn dist() -> Result<()> {
    let dist = tools::target().join("dist");
    if dist.exists() {
        fs::remove_dir_all(&dist)?;
    }
    fs::create_dir_all(&dist)?;
    let module = tools::build_filter()?;
    say("building the binaries: about ten minutes on 2 cores the first time");
    // Cargo's own progress shows that it works.
    run(cargo().args(["build", "--release", "--package", "homing-bench", "--package", "homing-collector"]))?;
    let release = tools::target().join("release");
    let mut shipped = vec![module.clone(), release.join("homing-collector"), release.join("homing-bench")];
    for file in &mut shipped {
        let to = dist.join(file.file_name().context("a file name")?);
        fs::copy(&*file, &to).with_context(|| format!("copying {}", file.display()))?;
        *file = to;
    }
    let manifest = write_image(&dist.join("homing-filter.oci"), &fs::read(&module)?)?;
    let mut sums = String::new();
    for file in &shipped {
        let (bytes, name) = (fs::read(file)?, file.file_name().unwrap_or_default().to_string_lossy());
        let sum = sha256(&bytes);
        println!("{:>10}  {sum}  {}", bytes.len(), file.display());
        sums.push_str(&format!("{sum}  {name}\n"));
    }
    fs::write(dist.join("SHA256SUMS"), sums)?;
    println!("{:>10}  {manifest}  {} (OCI image, sha256 of its manifest)", "", dist.join("homing-filter.oci").display());
    Ok(())
}

/// Writes an OCI image layout whose one layer has `plugin.wasm` in it, and returns the SHA-256 of its manifest.
///
/// The layout: <https://github.com/opencontainers/image-spec/blob/v1.1.1/image-layout.md>. The name of the file is the one that Istio and
/// Envoy Gateway look for. The same module makes the same bytes.
fn write_image(folder: &Path, module: &[u8]) -> Result<String> {
    let blobs = Blobs(folder.join("blobs/sha256"));
    fs::create_dir_all(&blobs.0)?;
    let mut tar = tar::Builder::new(Vec::new());
    let mut header = tar::Header::new_ustar();
    header.set_size(module.len() as u64);
    header.set_mode(0o644);
    header.set_cksum();
    tar.append_data(&mut header, "plugin.wasm", module)?;
    let tar = tar.into_inner()?;
    let diff_id = format!("sha256:{}", sha256(&tar));
    let mut gzip = GzBuilder::new().mtime(0).write(Vec::new(), Compression::best());
    std::io::Write::write_all(&mut gzip, &tar)?;
    let layer = blobs.write(LAYER, &gzip.finish()?)?;
    let config = json!({
        "architecture": "wasm", "os": "wasip1", "config": {},
        "rootfs": { "type": "layers", "diff_ids": [diff_id] },
    });
    let config = blobs.write(CONFIG, &serde_json::to_vec(&config)?)?;
    let manifest = json!({
        "schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": [layer],
        "annotations": {
            "org.opencontainers.image.title": "homing-filter",
            "org.opencontainers.image.version": env!("CARGO_PKG_VERSION"),
            "org.opencontainers.image.licenses": "Apache-2.0",
        },
    });
    let manifest = serde_json::to_vec(&manifest)?;
    let mut described = blobs.write(MANIFEST, &manifest)?;
    described["annotations"] = json!({ "org.opencontainers.image.ref.name": env!("CARGO_PKG_VERSION") });
    let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": [described] });
    fs::write(folder.join("index.json"), serde_json::to_vec(&index)?)?;
    fs::write(folder.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#)?;
    Ok(sha256(&manifest))
}

/// Where an image keeps its parts, each under the SHA-256 of its bytes.
struct Blobs(PathBuf);

impl Blobs {
    /// Writes one and returns its descriptor.
    fn write(&self, media_type: &str, bytes: &[u8]) -> Result<Value> {
        let sum = sha256(bytes);
        fs::write(self.0.join(&sum), bytes)?;
        Ok(json!({ "mediaType": media_type, "digest": format!("sha256:{sum}"), "size": bytes.len() }))
    }
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    /// The part a descriptor names, if it is what the descriptor says.
    fn part(folder: &Path, descriptor: &Value) -> Vec<u8> {
        let digest = descriptor["digest"].as_str().expect("a digest").strip_prefix("sha256:").expect("SHA-256");
        let bytes = fs::read(folder.join("blobs/sha256").join(digest)).expect("a part");
        assert_eq!((sha256(&bytes).as_str(), json!(bytes.len())), (digest, descriptor["size"].clone()));
        bytes
    }

    fn json_part(folder: &Path, descriptor: &Value) -> Value {
        serde_json::from_slice(&part(folder, descriptor)).expect("JSON")
    }

    #[test]
    fn an_image_leads_to_the_module_by_digests_that_are_right() {
        let folder = tempfile::tempdir().expect("a folder");
        let sum = write_image(folder.path(), b"\0asm\x01\0\0\0").expect("an image");
        let index: Value = serde_json::from_slice(&fs::read(folder.path().join("index.json")).expect("a file")).expect("JSON");
        assert_eq!(index["manifests"][0]["digest"], json!(format!("sha256:{sum}")));
        let manifest = json_part(folder.path(), &index["manifests"][0]);
        let config = json_part(folder.path(), &manifest["config"]);
        let mut tar = Vec::new();
        flate2::read::GzDecoder::new(&*part(folder.path(), &manifest["layers"][0])).read_to_end(&mut tar).expect("gzip");
        assert_eq!(config["rootfs"]["diff_ids"], json!([format!("sha256:{}", sha256(&tar))]));
        let mut archive = tar::Archive::new(&*tar);
        let mut files = archive.entries().expect("entries");
        let mut file = files.next().expect("a file").expect("a file");
        assert_eq!(file.path().expect("a path").to_str(), Some("plugin.wasm"));
        let mut module = Vec::new();
        file.read_to_end(&mut module).expect("bytes");
        assert_eq!(module, b"\0asm\x01\0\0\0");
        assert!(files.next().is_none());
    }

    #[test]
    fn the_same_module_makes_the_same_image() {
        let image = || write_image(tempfile::tempdir().expect("a folder").path(), b"\0asm").expect("an image");
        assert_eq!(image(), image());
    }
}
