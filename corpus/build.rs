//! A seed that is added or taken away is another corpus: the macro that embeds the folder sees only changes of files it knows.

fn main() {
    println!("cargo:rerun-if-changed=seeds");
}
