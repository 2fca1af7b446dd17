//! Files that list targets, in the format of Prometheus' file-based service discovery.
//!
//! Format: <https://prometheus.io/docs/prometheus/latest/configuration/configuration/#file_sd_config>, JSON or YAML: a list of
//! groups `{"targets": ["host:port", ...], "labels": {...}}`. Labels are allowed and mean nothing here.

use std::net::SocketAddr;

use serde::Deserialize;
use serde::de::IgnoredAny;

use super::watched;
use crate::config::is_host_name;
use crate::text::one_line;

/// Where an endpoint is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Target {
    /// At an address.
    Address(SocketAddr),
    /// At each address of a name.
    Name {
        /// The name.
        name: String,
        /// The port at each address.
        port: u16,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Group {
    targets: Vec<String>,
    #[serde(default, rename = "labels")]
    _labels: IgnoredAny,
}

impl Target {
    pub(crate) fn name(&self) -> Option<&String> {
        match self {
            Self::Address(_) => None,
            Self::Name { name, .. } => Some(name),
        }
    }

    fn read(text: &str) -> Result<Self, String> {
        let wrong = || {
            let text: String = text.chars().take(80).collect();
            format!("the target `{}` is not ip:port, [ipv6]:port or name:port", one_line(&text))
        };
        if let Ok(address) = text.parse::<SocketAddr>() {
            return if address.port() == 0 { Err(wrong()) } else { Ok(Self::Address(address)) };
        }
        let (name, port) = text.rsplit_once(':').ok_or_else(wrong)?;
        let port = port.parse().ok().filter(|&port| port != 0).ok_or_else(wrong)?;
        if is_host_name(name) { Ok(Self::Name { name: name.to_owned(), port }) } else { Err(wrong()) }
    }
}

/// The targets of a file; one that is wrong makes the whole file wrong, since half a list is worse than the last one.
pub(crate) fn read_targets(content: &[u8]) -> Result<Vec<Target>, String> {
    let groups: Vec<Group> = watched::read_yaml(content, "a list of groups, such as `[{\"targets\": [\"10.0.0.1:8000\"]}]`")?;
    groups.iter().flat_map(|group| &group.targets).map(|text| Target::read(text)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_corpus::{mutated, seeds};
    use proptest::prelude::*;

    fn address(text: &str) -> Target {
        Target::Address(text.parse().expect("an address"))
    }

    fn name(name: &str, port: u16) -> Target {
        Target::Name { name: name.to_owned(), port }
    }

    #[test]
    fn json_and_yaml_are_read_and_labels_are_ignored() {
        let json =
            br#"[{"targets": ["10.0.0.1:8000", "[fd00::1]:8000"], "labels": {"rack": "a"}}, {"targets": ["gpu-3.local:80"]}]"#;
        let yaml = b"- targets:\n  - 10.0.0.1:8000\n  - '[fd00::1]:8000'\n  labels: { rack: a }\n- targets: [gpu-3.local:80]\n";
        let expected = vec![address("10.0.0.1:8000"), address("[fd00::1]:8000"), name("gpu-3.local", 80)];
        assert_eq!(read_targets(json), Ok(expected.clone()));
        assert_eq!(read_targets(yaml), Ok(expected));
    }

    #[test]
    fn no_targets_have_to_be_said() {
        assert_eq!(read_targets(b"[]"), Ok(Vec::new()));
        assert_eq!(read_targets(b"[{\"targets\": []}]"), Ok(Vec::new()));
        for nothing in ["", "\n", "# later\n"] {
            assert!(read_targets(nothing.as_bytes()).expect_err("nothing").contains("[] for none"));
        }
    }

    #[test]
    fn a_broken_file_is_refused_as_a_whole_with_what_is_allowed() {
        let cases = [
            ("[{\"targets\": [\"10.0.0.1:8000\"", "a list of groups"),
            ("[{\"target\": [\"10.0.0.1:8000\"]}]", "target"),
            ("[{\"labels\": {}}]", "targets"),
            ("{\"targets\": []}", "a list of groups"),
            ("[{\"targets\": [\"10.0.0.1:8000\", \"10.0.0.2\"]}]", "`10.0.0.2` is not ip:port"),
            ("[{\"targets\": [\"10.0.0.1:0\"]}]", "`10.0.0.1:0` is not"),
            ("[{\"targets\": [\"http://a:80\"]}]", "`http://a:80` is not"),
            ("[{\"targets\": [\"a b:80\"]}]", "`a b:80` is not"),
            ("[{\"targets\": [\"a:99999\"]}]", "`a:99999` is not"),
        ];
        for (text, says) in cases {
            let problem = read_targets(text.as_bytes()).expect_err(text);
            assert!(problem.contains(says), "{text}: {problem}");
        }
        assert!(read_targets(b"\xff").expect_err("no UTF-8").contains("UTF-8"));
    }

    proptest! {
        #[test]
        fn any_file_is_targets_that_read_back_or_refused_in_a_line(content in mutated(seeds("file_sd"))) {
            match read_targets(&content) {
                Ok(targets) => {
                    let texts: Vec<_> = targets
                        .iter()
                        .map(|target| match target {
                            Target::Address(address) => address.to_string(),
                            Target::Name { name, port } => format!("{name}:{port}"),
                        })
                        .collect();
                    let json = serde_json::json!([{ "targets": texts }]).to_string();
                    prop_assert_eq!(read_targets(json.as_bytes()), Ok(targets));
                }
                Err(problem) => prop_assert!(watched::is_short(&problem), "{problem:?}"),
            }
        }

        #[test]
        fn addresses_read_back(addresses in prop::collection::vec((any::<[u8; 4]>(), 1_u16..), 0..20)) {
            let addresses: Vec<_> = addresses.into_iter().map(|(ip, port)| SocketAddr::from((ip, port))).collect();
            let json = serde_json::json!([{ "targets": addresses }]).to_string();
            prop_assert_eq!(read_targets(json.as_bytes()), Ok(addresses.into_iter().map(Target::Address).collect()));
        }
    }
}
