//! The KV cache's blocks: reference counts, the prefix cache that finds them by content, and the order in which they are used again.

use std::collections::{BTreeMap, HashMap};
use std::hash::{DefaultHasher, Hash, Hasher};

/// A block's place in the cache.
pub(super) type BlockId = usize;
/// Stands for a block's tokens and all tokens before them.
pub(super) type BlockHash = u64;

/// The hashes of the full blocks of `prompt` followed by `output`, each chained on the hash of the block before.
pub(super) fn hash_blocks(prompt: &[u32], output: &[u32], block_size: usize) -> Vec<BlockHash> {
    let total = prompt.len() + output.len();
    let mut tokens = prompt.iter().chain(output);
    let mut parent = 0;
    (0..total / block_size)
        .map(|_| {
            let mut hasher = DefaultHasher::new();
            parent.hash(&mut hasher);
            tokens.by_ref().take(block_size).for_each(|token| token.hash(&mut hasher));
            parent = hasher.finish();
            parent
        })
        .collect()
}

#[derive(Debug)]
struct Block {
    references: u32,
    /// Set once the block is full: then it is found by this.
    hash: Option<BlockHash>,
    /// Key in the free queue while `references` is 0.
    freed_at: i64,
}

/// All blocks. A block without references is in the free queue and, if it has a hash, can still be found: it is forgotten only when it is
/// taken for other content, the longest free first.
#[derive(Debug)]
pub(super) struct BlockPool {
    blocks: Vec<Block>,
    free: BTreeMap<i64, BlockId>,
    /// Several blocks can have the same content: requests that computed it at the same time.
    by_hash: HashMap<BlockHash, Vec<BlockId>>,
    /// Keys before and behind all that are in the queue.
    front: i64,
    back: i64,
}

impl BlockPool {
    pub(super) fn new(count: usize) -> Self {
        let mut pool =
            Self { blocks: Vec::with_capacity(count), free: BTreeMap::new(), by_hash: HashMap::new(), front: -1, back: 0 };
        for id in 0..count {
            pool.blocks.push(Block { references: 0, hash: None, freed_at: 0 });
            pool.free(id);
        }
        pool
    }

    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks without references.
    pub(super) fn free_len(&self) -> usize {
        self.free.len()
    }

    /// The blocks that hold the longest cached prefix of `hashes`.
    pub(super) fn find_prefix(&self, hashes: &[BlockHash]) -> Vec<BlockId> {
        hashes.iter().map_while(|hash| self.by_hash.get(hash)?.first().copied()).collect()
    }

    /// How many of `ids` are in the free queue: taking them leaves that much less for others.
    pub(super) fn count_free(&self, ids: &[BlockId]) -> usize {
        ids.iter().filter(|&&id| self.blocks[id].references == 0).count()
    }

    /// Adds a reference to a block found by [`Self::find_prefix`].
    pub(super) fn touch(&mut self, id: BlockId) {
        let block = &mut self.blocks[id];
        if block.references == 0 {
            self.free.remove(&block.freed_at);
        }
        block.references += 1;
    }

    /// Takes the block that has been free the longest, with one reference and without content. None if all are in use.
    pub(super) fn allocate(&mut self) -> Option<BlockId> {
        let (_, id) = self.free.pop_first()?;
        self.blocks[id].references = 1;
        self.forget(id);
        Some(id)
    }

    /// Makes a full block findable.
    pub(super) fn set_hash(&mut self, id: BlockId, hash: BlockHash) {
        if self.blocks[id].hash.is_none() {
            self.blocks[id].hash = Some(hash);
            self.by_hash.entry(hash).or_default().push(id);
        }
    }

    /// Gives back a sequence's blocks. The last goes into the free queue first, since a prefix is of use without its end but not the
    /// other way round. One without content that can be found, the last partial block, goes to the queue's front.
    pub(super) fn release(&mut self, ids: &[BlockId]) {
        for &id in ids.iter().rev() {
            let block = &mut self.blocks[id];
            block.references -= 1;
            if block.references == 0 {
                self.free(id);
            }
        }
    }

    fn free(&mut self, id: BlockId) {
        let block = &mut self.blocks[id];
        let end = if block.hash.is_some() { &mut self.back } else { &mut self.front };
        block.freed_at = *end;
        *end += if block.hash.is_some() { 1 } else { -1 };
        self.free.insert(block.freed_at, id);
    }

    fn forget(&mut self, id: BlockId) {
        let Some(hash) = self.blocks[id].hash.take() else { return };
        if let Some(same) = self.by_hash.get_mut(&hash) {
            same.retain(|&other| other != id);
            if same.is_empty() {
                self.by_hash.remove(&hash);
            }
        }
    }

    /// Panics unless every block is either free or referenced, and the prefix cache lists exactly the blocks that have a hash.
    #[cfg(test)]
    pub(super) fn check(&self) {
        for (id, block) in self.blocks.iter().enumerate() {
            assert_eq!(block.references == 0, self.free.get(&block.freed_at) == Some(&id), "block {id}: {block:?}");
        }
        let mut listed = 0;
        for (hash, ids) in &self.by_hash {
            assert!(!ids.is_empty());
            assert!(ids.iter().all(|&id| self.blocks[id].hash == Some(*hash)));
            listed += ids.len();
        }
        assert_eq!(listed, self.blocks.iter().filter(|block| block.hash.is_some()).count());
        assert!(listed <= self.len());
    }

    /// References held, over all blocks.
    #[cfg(test)]
    pub(super) fn references(&self) -> usize {
        self.blocks.iter().map(|block| block.references as usize).sum()
    }
}
