//! The versions of vLLM whose answers the stand-in knows.

use crate::balancer::BalancerKind;
use clap::ValueEnum;

/// A version of vLLM. What the stand-in answers is the same in both unless it was recorded to differ.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Version {
    /// 0.26.0
    #[default]
    #[value(name = "0.26")]
    V0_26,
    /// 0.32.0
    #[value(name = "0.32")]
    V0_32,
}

impl Version {
    /// As `/version` has it.
    pub fn number(self) -> &'static str {
        match self {
            Self::V0_26 => "0.26.0",
            Self::V0_32 => "0.32.0",
        }
    }

    /// How it chooses among the ranks of an endpoint.
    pub fn balancer(self) -> BalancerKind {
        match self {
            Self::V0_26 => BalancerKind::Vllm026,
            Self::V0_32 => BalancerKind::Vllm027,
        }
    }
}
